//! A context: sequences, batches, logits, state bytes.

use std::ptr::NonNull;
use std::sync::Arc;

use llama_cpp_sys_2 as sys;

use super::{RawModel, start, take_error};

/// Sizes of a context, all checked by the caller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextSizes {
    pub(crate) cells: u32,
    pub(crate) batch_tokens: u32,
    pub(crate) sequences: u32,
    pub(crate) outputs: u32,
    pub(crate) threads: i32,
    /// One stream of cells for all sequences, or one for each.
    pub(crate) unified: bool,
}

/// The longest list of sequences that one context can have.
pub(crate) fn sequences_max() -> usize {
    // SAFETY: a constant of the library.
    unsafe { sys::llama_max_parallel_sequences() }
}

/// A context and the buffers of its batch.
pub(crate) struct RawContext {
    context: NonNull<sys::llama_context>,
    memory: sys::llama_memory_t,
    sequences: u32,
    batch_tokens: usize,
    vocabulary_size: usize,
    batch: Batch,
    /// Keeps the weights alive: dropped after the context is freed.
    _model: Arc<RawModel>,
}

// SAFETY: a context is used through `&mut` or by one thread at a time; it is
// bound to no thread of its own.
unsafe impl Send for RawContext {}

impl Drop for RawContext {
    fn drop(&mut self) {
        // SAFETY: we own the context, and the model outlives it.
        unsafe { sys::llama_free(self.context.as_ptr()) }
    }
}

impl RawContext {
    /// `Err` with llama.cpp's reason.
    pub(crate) fn new(model: Arc<RawModel>, sizes: ContextSizes) -> Result<Self, String> {
        start();
        // SAFETY: default params are plain data; the model is live. Sizes are in
        // range, and `outputs >= sequences`, which llama.cpp asserts.
        let context = unsafe {
            let mut params = sys::llama_context_default_params();
            params.n_ctx = sizes.cells;
            params.n_batch = sizes.batch_tokens;
            params.n_ubatch = sizes.batch_tokens;
            params.n_seq_max = sizes.sequences;
            params.n_outputs_max = sizes.outputs.max(sizes.sequences);
            params.n_threads = sizes.threads;
            params.n_threads_batch = sizes.threads;
            // Off, V would lie transposed and rows could not be cut out.
            params.flash_attn_type = sys::LLAMA_FLASH_ATTN_TYPE_ENABLED;
            params.type_k = sys::GGML_TYPE_F16;
            params.type_v = sys::GGML_TYPE_F16;
            // Off, rows behind the window would be overwritten before they are exported.
            params.swa_full = true;
            params.kv_unified = sizes.unified;
            params.no_perf = true;
            sys::llama_init_from_model(model.model.as_ptr(), params)
        };
        let context = NonNull::new(context).ok_or_else(|| take_error("llama.cpp cannot make a context"))?;
        // SAFETY: the context is live.
        let memory = unsafe { sys::llama_get_memory(context.as_ptr()) };
        let vocabulary_size = model.vocabulary_size();
        let batch_tokens = sizes.batch_tokens as usize;
        let raw = Self {
            context,
            memory,
            sequences: sizes.sequences,
            batch_tokens,
            vocabulary_size,
            batch: Batch::default(),
            _model: model,
        };
        if memory.is_null() {
            return Err("the model has no memory to keep a sequence in".to_owned());
        }
        Ok(raw)
    }

    /// The batch that the next [`RawContext::decode`] computes, emptied.
    pub(crate) fn batch(&mut self) -> &mut Batch {
        self.batch.clear();
        &mut self.batch
    }

    /// Computes the batch. Returns llama.cpp's code, 0 if all went well.
    /// Waits until the results are there.
    pub(crate) fn decode(&mut self) -> i32 {
        let count = self.batch.tokens.len();
        let known = self.batch.sequences.iter().all(|&seq| seq.cast_unsigned() < self.sequences);
        let valid = self.batch.tokens.iter().all(|&t| (t.cast_unsigned() as usize) < self.vocabulary_size);
        if count == 0 || count > self.batch_tokens || !known || !valid {
            return INVALID_BATCH;
        }
        let raw = self.batch.raw();
        // SAFETY: the arrays live in `self.batch` and have `n_tokens` entries;
        // count, tokens and sequences are in the range that llama.cpp asserts.
        unsafe {
            let code = sys::llama_decode(self.context.as_ptr(), raw);
            sys::llama_synchronize(self.context.as_ptr());
            code
        }
    }

    /// Where the logits of batch entry `index` lie, until the next decode.
    ///
    /// The first call after a decode may sort llama.cpp's buffer, so all
    /// entries wanted are asked for before any of them is read.
    pub(crate) fn logits_place(&mut self, index: usize) -> Option<LogitsPlace> {
        let index = i32::try_from(index).ok()?;
        // SAFETY: the context is live; a wrong index gives null.
        let place = unsafe { sys::llama_get_logits_ith(self.context.as_ptr(), index) };
        Some(LogitsPlace(NonNull::new(place)?))
    }

    /// The logits at a place given out since the last decode.
    pub(crate) fn logits(&self, place: &LogitsPlace) -> &[f32] {
        // SAFETY: the buffer has a row of `vocabulary_size` at every place and
        // changes only in decode, which needs `&mut self`. The caller drops
        // places before it decodes again.
        unsafe { std::slice::from_raw_parts(place.0.as_ptr(), self.vocabulary_size) }
    }

    /// Forgets positions `from..` of a sequence. False if the memory cannot
    /// forget a part.
    pub(crate) fn remove(&mut self, seq: i32, from: usize) -> bool {
        let (Ok(from), true) = (i32::try_from(from), self.knows(seq)) else { return false };
        // SAFETY: the memory lives as long as the context; the sequence is in range.
        unsafe { sys::llama_memory_seq_rm(self.memory, seq, from, -1) }
    }

    /// Lets sequence `to` share the cells of `from` in `start..end`. Only for a
    /// unified context: elsewhere llama.cpp stops the process.
    pub(crate) fn share(&mut self, from: i32, to: i32, start: i32, end: i32) {
        assert!(self.knows(from) && self.knows(to), "sequences of this context");
        // SAFETY: the memory lives as long as the context; sequences are in range.
        unsafe { sys::llama_memory_seq_cp(self.memory, from, to, start, end) }
    }

    /// The state bytes of one sequence; empty if llama.cpp cannot give them.
    pub(crate) fn state(&mut self, seq: i32) -> Vec<u8> {
        if !self.knows(seq) {
            return Vec::new();
        }
        let context = self.context.as_ptr();
        // SAFETY: context live, sequence in range; the buffer has room for
        // `size` bytes, and only as many as llama.cpp says it wrote are read.
        unsafe {
            let size = sys::llama_state_seq_get_size_ext(context, seq, 0);
            filled(size, |place| sys::llama_state_seq_get_data_ext(context, place, size, seq, 0))
        }
    }

    /// The state bytes of the whole context; empty if llama.cpp cannot give them.
    pub(crate) fn whole_state(&mut self) -> Vec<u8> {
        let context = self.context.as_ptr();
        // SAFETY: as in `state`.
        unsafe {
            let size = sys::llama_state_get_size(context);
            filled(size, |place| sys::llama_state_get_data(context, place, size))
        }
    }

    /// Replaces a sequence by a state; false if llama.cpp refuses it.
    pub(crate) fn set_state(&mut self, seq: i32, state: &[u8]) -> bool {
        if !self.knows(seq) {
            return false;
        }
        // SAFETY: context live, sequence in range, pointer and length of one slice.
        let read = unsafe {
            sys::llama_state_seq_set_data_ext(self.context.as_ptr(), state.as_ptr(), state.len(), seq, 0)
        };
        read == state.len()
    }

    fn knows(&self, seq: i32) -> bool {
        seq >= 0 && seq.cast_unsigned() < self.sequences
    }
}

/// A row of llama.cpp's output buffer, see [`RawContext::logits_place`].
pub(crate) struct LogitsPlace(NonNull<f32>);

// SAFETY: only a place; it is read through the context that it belongs to.
unsafe impl Send for LogitsPlace {}

/// What `llama_decode` says of a batch that it does not accept.
const INVALID_BATCH: i32 = -1;

/// # Safety
/// `fill` writes at most `size` bytes to its argument and returns how many.
unsafe fn filled(size: usize, fill: impl FnOnce(*mut u8) -> usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size);
    let written = fill(bytes.as_mut_ptr());
    if written == size {
        // SAFETY: the capacity is `size`, and all of it was written.
        unsafe { bytes.set_len(size) };
    }
    bytes
}

/// The arrays of a `llama_batch`, kept between steps.
#[derive(Default)]
pub(crate) struct Batch {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    sequences: Vec<i32>,
    sequence_counts: Vec<i32>,
    sequence_places: Vec<*mut i32>,
    logits: Vec<i8>,
}

impl Batch {
    /// Appends one token; its index is the number of tokens before it.
    pub(crate) fn push(&mut self, token: u32, position: usize, seq: i32, logits: bool) {
        self.tokens.push(token.cast_signed());
        self.positions.push(i32::try_from(position).unwrap_or(i32::MAX));
        self.sequences.push(seq);
        self.logits.push(i8::from(logits));
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.sequences.clear();
        self.logits.clear();
    }

    fn raw(&mut self) -> sys::llama_batch {
        let count = self.tokens.len();
        self.sequence_counts.clear();
        self.sequence_counts.resize(count, 1);
        self.sequence_places.clear();
        self.sequence_places.extend(self.sequences.iter_mut().map(std::ptr::from_mut));
        sys::llama_batch {
            n_tokens: i32::try_from(count).unwrap_or(i32::MAX),
            token: self.tokens.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: self.positions.as_mut_ptr(),
            n_seq_id: self.sequence_counts.as_mut_ptr(),
            seq_id: self.sequence_places.as_mut_ptr(),
            logits: self.logits.as_mut_ptr(),
        }
    }
}
