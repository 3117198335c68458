//! GGUF files without a model: their header, and writing one with other weights.

use std::ffi::CString;
use std::path::Path;
use std::ptr::NonNull;

use llama_cpp_sys_2 as sys;

use super::{c_path, c_text, start, take_error};

/// Header and tensor table of a GGUF file, without its data.
pub(crate) struct RawGguf(NonNull<sys::gguf_context>);

/// One tensor of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorPlace {
    pub(crate) name: String,
    /// Offset of its first byte in the file.
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

impl Drop for RawGguf {
    fn drop(&mut self) {
        // SAFETY: we own it.
        unsafe { sys::gguf_free(self.0.as_ptr()) }
    }
}

impl RawGguf {
    /// `Err` with ggml's reason.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        start();
        let path = c_path(path).ok_or("its name contains a zero byte")?;
        let params = sys::gguf_init_params { no_alloc: true, ctx: std::ptr::null_mut() };
        // SAFETY: the path is zero-terminated; with no_alloc and no ctx only
        // the header is read.
        let gguf = unsafe { sys::gguf_init_from_file(path.as_ptr(), params) };
        NonNull::new(gguf).map(Self).ok_or_else(|| take_error("its header cannot be read"))
    }

    /// Offset of the first byte behind metadata and tensor table.
    pub(crate) fn data_offset(&self) -> u64 {
        // SAFETY: the context is live.
        unsafe { sys::gguf_get_data_offset(self.0.as_ptr()) as u64 }
    }

    pub(crate) fn tensors(&self) -> Vec<TensorPlace> {
        let gguf = self.0.as_ptr();
        // SAFETY: the context is live and ids run from 0 to the count.
        unsafe {
            (0..sys::gguf_get_n_tensors(gguf))
                .map(|id| TensorPlace {
                    name: c_text(sys::gguf_get_tensor_name(gguf, id)).unwrap_or_default(),
                    start: self.data_offset() + sys::gguf_get_tensor_offset(gguf, id) as u64,
                    bytes: sys::gguf_get_tensor_size(gguf, id) as u64,
                })
                .collect()
        }
    }

    /// A string value, if the key exists and holds one.
    pub(crate) fn text(&self, key: &str) -> Option<String> {
        let id = self.find(key, sys::GGUF_TYPE_STRING)?;
        // SAFETY: the id exists and the type is checked, which ggml asserts.
        c_text(unsafe { sys::gguf_get_val_str(self.0.as_ptr(), id) })
    }

    /// An unsigned value of 16 or 32 bits, if the key exists and holds one.
    pub(crate) fn number(&self, key: &str) -> Option<u32> {
        if let Some(id) = self.find(key, sys::GGUF_TYPE_UINT32) {
            // SAFETY: the id exists and the type is checked.
            return Some(unsafe { sys::gguf_get_val_u32(self.0.as_ptr(), id) });
        }
        let id = self.find(key, sys::GGUF_TYPE_UINT16)?;
        // SAFETY: the id exists and the type is checked.
        Some(u32::from(unsafe { sys::gguf_get_val_u16(self.0.as_ptr(), id) }))
    }

    fn find(&self, key: &str, kind: sys::gguf_type) -> Option<i64> {
        let key = CString::new(key).ok()?;
        // SAFETY: the context is live; a found id is valid for the type query.
        unsafe {
            let id = sys::gguf_find_key(self.0.as_ptr(), key.as_ptr());
            (id >= 0 && sys::gguf_get_kv_type(self.0.as_ptr(), id) == kind).then_some(id)
        }
    }
}

/// Writes `from` with other weight types to `to`. `Err` with llama.cpp's reason.
pub(crate) fn quantize(from: &Path, to: &Path, kind: QuantizeTo, threads: i32) -> Result<(), String> {
    start();
    let from = c_path(from).ok_or("its name contains a zero byte")?;
    let to = c_path(to).ok_or("the target's name contains a zero byte")?;
    // SAFETY: default params are plain data; both paths are zero-terminated.
    let code = unsafe {
        let mut params = sys::llama_model_quantize_default_params();
        params.nthread = threads;
        params.allow_requantize = true;
        params.ftype = match kind {
            QuantizeTo::Q8_0 => sys::LLAMA_FTYPE_MOSTLY_Q8_0,
            QuantizeTo::F16 => sys::LLAMA_FTYPE_MOSTLY_F16,
            QuantizeTo::Bf16 => sys::LLAMA_FTYPE_MOSTLY_BF16,
        };
        sys::llama_model_quantize(from.as_ptr(), to.as_ptr(), &raw const params)
    };
    if code == 0 { Ok(()) } else { Err(take_error("llama.cpp cannot quantise it")) }
}

/// Target of [`quantize`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum QuantizeTo {
    Q8_0,
    F16,
    Bf16,
}
