//! What a GGUF file says of itself, read without loading it.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use kv_block::Fingerprint;

use crate::EngineError;
use crate::ffi::{RawGguf, TensorPlace};

/// What people want to know of a model file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSummary {
    /// `general.name`, or the file's name without its ending.
    pub name: String,
    /// `general.architecture`.
    pub architecture: String,
    /// Longest context the model was trained for, in tokens; 0 if not stated.
    pub context_tokens_max: usize,
    /// Bytes of all its files.
    pub file_bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
    /// Whether the file carries a chat template.
    pub has_chat_template: bool,
}

/// Bytes hashed at the start, the middle and the end of every tensor. A page
/// each: any difference in training or quantisation shows in it, and a model
/// of 300 tensors is read in milliseconds.
const SAMPLE_BYTES: u64 = 4096;

/// Hash over metadata, tensor table and a sample of every tensor; the same
/// wherever the file lies. Errors: `Load` naming the path.
pub fn fingerprint(path: &Path) -> Result<Fingerprint, EngineError> {
    let mut hasher = blake3::Hasher::new_derive_key("segue model fingerprint v1");
    for part in open_all(path)? {
        hash_part(&mut hasher, &part).map_err(|error| load_error(&part.path, &error.to_string()))?;
    }
    Ok(Fingerprint(*hasher.finalize().as_bytes()))
}

/// Name, architecture and sizes of the model at `path`. Errors: `Load`.
pub fn model_summary(path: &Path) -> Result<ModelSummary, EngineError> {
    let parts = open_all(path)?;
    let first = &parts[0].gguf;
    let architecture = first.text("general.architecture").unwrap_or_default();
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    Ok(ModelSummary {
        name: first.text("general.name").filter(|name| !name.is_empty()).unwrap_or(stem),
        context_tokens_max: first.number(&format!("{architecture}.context_length")).unwrap_or(0) as usize,
        architecture,
        file_bytes: parts.iter().map(|part| part.file_bytes).sum(),
        tensors: parts.iter().map(|part| part.tensors.len()).sum(),
        has_chat_template: first.text("tokenizer.chat_template").is_some(),
    })
}

struct Part {
    path: PathBuf,
    file: File,
    file_bytes: u64,
    gguf: RawGguf,
    tensors: Vec<TensorPlace>,
}

/// The file, and its followers if the model is split over several.
fn open_all(path: &Path) -> Result<Vec<Part>, EngineError> {
    let first = open(path)?;
    let count = first.gguf.number("split.count").unwrap_or(1).max(1);
    let mut parts = vec![first];
    for index in 2..=count {
        let next = follower(path, index, count).ok_or_else(|| {
            load_error(path, &format!("one of {count} files, but not named like the first"))
        })?;
        parts.push(open(&next)?);
    }
    Ok(parts)
}

/// `x-00001-of-00003.gguf` → `x-00002-of-00003.gguf`.
fn follower(path: &Path, index: u32, count: u32) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let prefix = name.strip_suffix(&format!("-00001-of-{count:05}.gguf"))?;
    Some(path.with_file_name(format!("{prefix}-{index:05}-of-{count:05}.gguf")))
}

fn open(path: &Path) -> Result<Part, EngineError> {
    let fail = |reason: &str| load_error(path, reason);
    let mut file = File::open(path).map_err(|error| fail(&error.to_string()))?;
    let metadata = file.metadata().map_err(|error| fail(&error.to_string()))?;
    if !metadata.is_file() {
        return Err(fail("not a file"));
    }
    let mut magic = [0; 4];
    if file.read_exact(&mut magic).is_err() || magic != *b"GGUF" {
        return Err(fail("not a GGUF file"));
    }
    let gguf = RawGguf::open(path).map_err(|reason| fail(&reason))?;
    let tensors = gguf.tensors();
    let file_bytes = metadata.len();
    for tensor in &tensors {
        let end = tensor.start.saturating_add(tensor.bytes);
        if end > file_bytes {
            let name = &tensor.name;
            return Err(fail(&format!("truncated: tensor {name} ends at byte {end} of {file_bytes}")));
        }
    }
    Ok(Part { path: path.to_owned(), file, file_bytes, gguf, tensors })
}

fn hash_part(hasher: &mut blake3::Hasher, part: &Part) -> std::io::Result<()> {
    hash_range(hasher, &part.file, 0, part.gguf.data_offset())?;
    for tensor in &part.tensors {
        for (start, bytes) in samples(tensor) {
            hash_range(hasher, &part.file, start, bytes)?;
        }
    }
    Ok(())
}

/// Start, middle and end of a tensor; all of a small one.
fn samples(tensor: &TensorPlace) -> Vec<(u64, u64)> {
    if tensor.bytes <= 3 * SAMPLE_BYTES {
        return vec![(tensor.start, tensor.bytes)];
    }
    let middle = tensor.start + (tensor.bytes - SAMPLE_BYTES) / 2;
    let end = tensor.start + tensor.bytes - SAMPLE_BYTES;
    [tensor.start, middle, end].map(|start| (start, SAMPLE_BYTES)).to_vec()
}

fn hash_range(hasher: &mut blake3::Hasher, mut file: &File, start: u64, bytes: u64) -> std::io::Result<()> {
    file.seek(SeekFrom::Start(start))?;
    let mut left = file.take(bytes);
    let mut buffer = [0; 4096];
    loop {
        match left.read(&mut buffer)? {
            0 => return Ok(()),
            count => hasher.update(&buffer[..count]),
        };
    }
}

pub(super) fn load_error(path: &Path, reason: &str) -> EngineError {
    EngineError::Load { path: path.display().to_string(), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(bytes: u64) -> TensorPlace {
        TensorPlace { name: String::new(), start: 1000, bytes }
    }

    #[test]
    fn small_tensors_are_hashed_whole_and_large_ones_at_start_middle_and_end() {
        assert_eq!(samples(&tensor(12288)), [(1000, 12288)]);
        assert_eq!(samples(&tensor(20480)), [(1000, 4096), (1000 + 8192, 4096), (1000 + 16384, 4096)]);
    }

    #[test]
    fn followers_of_a_split_model_are_named_like_the_first_file() {
        let first = Path::new("/models/big-00001-of-00003.gguf");
        assert_eq!(follower(first, 3, 3).unwrap(), Path::new("/models/big-00003-of-00003.gguf"));
        assert_eq!(follower(Path::new("/models/renamed.gguf"), 2, 3), None);
    }
}
