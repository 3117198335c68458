//! The shape of a model's KV cache: which row arrays there are and how wide.
//!
//! ```text
//!  section 0 (e.g. sliding window)   layer 0: K rows, V rows
//!                                    layer 1: K rows, V rows
//!  section 1 (e.g. full attention)   layer 0: K rows, V rows …
//! ```
//!
//! One row holds one token's K (or V) of one layer, all heads together. The
//! order of [`Layout::parts`] — section, then layer, then K before V — is the
//! order of frames on the wire.

use std::fmt;

use crate::LayoutId;

/// Bounds that a peer's or a probe's layout must keep: far above any model
/// known, and small enough that nothing can be made to allocate without end.
const SECTIONS_MAX: usize = 16;
const LAYERS_MAX: usize = 1024;
const ROW_BYTES_MAX: u32 = 1 << 20;

/// Key rows or value rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// Keys.
    K,
    /// Values.
    V,
}

/// One row array of the cache: a layer's K or V rows for all tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    /// Cache section, in the engine's order.
    pub section: u16,
    /// Layer within the section, in the engine's order.
    pub layer: u16,
    /// Keys or values.
    pub side: Side,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "section {} layer {} {:?}", self.section, self.layer, self.side)
    }
}

/// Type and width of one token's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowSpec {
    /// ggml type id of the elements (0 = F32, 1 = F16, 8 = Q8_0, 30 = BF16).
    pub dtype: u32,
    /// Bytes of one token's row.
    pub row_bytes: u32,
}

/// Rows of one layer. Latent caches (MLA) have keys only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerSpec {
    /// Key rows.
    pub k: RowSpec,
    /// Value rows, if the cache stores any.
    pub v: Option<RowSpec>,
}

/// Layers that share one cell table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Section {
    /// Layers in the engine's order.
    pub layers: Vec<LayerSpec>,
}

/// Why a layout is not usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// No section, or more than any model has.
    #[error("layout has {0} sections, allowed 1 to {SECTIONS_MAX}")]
    Sections(usize),
    /// No layer, or more than any model has.
    #[error("layout section {section} has {layers} layers, allowed 1 to {LAYERS_MAX}")]
    Layers {
        /// Index of the section.
        section: usize,
        /// Its layers.
        layers: usize,
    },
    /// A row of no width, or wider than any model's.
    #[error("layout row has {0} bytes, allowed 1 to {ROW_BYTES_MAX}")]
    RowBytes(u32),
}

/// The KV layout of one model in one cache configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    sections: Vec<Section>,
    parts: Vec<(Part, RowSpec)>,
    id: LayoutId,
}

impl Layout {
    /// Checks the bounds and computes the id once.
    pub fn new(sections: Vec<Section>) -> Result<Self, LayoutError> {
        check(&sections)?;
        let parts = list_parts(&sections);
        let id = identify(&parts);
        Ok(Self { sections, parts, id })
    }

    /// Hash of everything that two nodes must agree on.
    pub fn id(&self) -> LayoutId {
        self.id
    }

    /// The sections, in the engine's order.
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// All row arrays in wire order.
    pub fn parts(&self) -> &[(Part, RowSpec)] {
        &self.parts
    }

    /// Position of `part` in [`Layout::parts`], or `None` if there is none such.
    pub fn part_index(&self, part: Part) -> Option<usize> {
        // Parts are listed in their own order, so a search by order finds them.
        self.parts.binary_search_by_key(&part, |(part, _)| *part).ok()
    }

    /// Width and type of `part`'s rows, or `None` if there is no such part.
    pub fn row(&self, part: Part) -> Option<RowSpec> {
        self.part_index(part).map(|index| self.parts[index].1)
    }

    /// Bytes of KV per token over all parts.
    pub fn bytes_per_token(&self) -> u64 {
        self.parts.iter().map(|(_, row)| u64::from(row.row_bytes)).sum()
    }
}

fn check(sections: &[Section]) -> Result<(), LayoutError> {
    if sections.is_empty() || sections.len() > SECTIONS_MAX {
        return Err(LayoutError::Sections(sections.len()));
    }
    for (section, spec) in sections.iter().enumerate() {
        let layers = spec.layers.len();
        if layers == 0 || layers > LAYERS_MAX {
            return Err(LayoutError::Layers { section, layers });
        }
        for row in spec.layers.iter().flat_map(|layer| [Some(layer.k), layer.v]).flatten() {
            if row.row_bytes == 0 || row.row_bytes > ROW_BYTES_MAX {
                return Err(LayoutError::RowBytes(row.row_bytes));
            }
        }
    }
    Ok(())
}

fn list_parts(sections: &[Section]) -> Vec<(Part, RowSpec)> {
    let mut parts = Vec::new();
    for (section, spec) in (0u16..).zip(sections) {
        for (layer, rows) in (0u16..).zip(&spec.layers) {
            parts.push((Part { section, layer, side: Side::K }, rows.k));
            if let Some(v) = rows.v {
                parts.push((Part { section, layer, side: Side::V }, v));
            }
        }
    }
    parts
}

fn identify(parts: &[(Part, RowSpec)]) -> LayoutId {
    let mut hasher = blake3::Hasher::new_derive_key("segue kv layout v1");
    for (part, row) in parts {
        hasher.update(&part.section.to_le_bytes());
        hasher.update(&part.layer.to_le_bytes());
        hasher.update(&[match part.side {
            Side::K => 0,
            Side::V => 1,
        }]);
        hasher.update(&row.dtype.to_le_bytes());
        hasher.update(&row.row_bytes.to_le_bytes());
    }
    LayoutId(*hasher.finalize().as_bytes())
}
