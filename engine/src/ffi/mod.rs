//! The only unsafe code of the CPU path: safe owners of llama.cpp's objects.
//!
//! Each wrapper checks what llama.cpp would answer with an abort (token ids,
//! batch sizes, sequence ids) and turns its codes into `Result`s. Nothing here
//! knows layouts or slots; that is `llama/`.
#![allow(unsafe_code)]

mod context;
mod gguf;
mod model;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::sync::Once;

use llama_cpp_sys_2 as sys;

pub(crate) use context::{ContextSizes, LogitsPlace, RawContext, sequences_max};
pub(crate) use gguf::{QuantizeTo, RawGguf, TensorPlace, quantize};
pub(crate) use model::RawModel;

thread_local! {
    /// Last error line that llama.cpp logged on this thread: its calls return
    /// only null or a code, the reason is in the log.
    static LAST_ERROR: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The reason that llama.cpp logged for the call that has just failed.
pub(crate) fn take_error(otherwise: &str) -> String {
    LAST_ERROR.with_borrow_mut(Option::take).unwrap_or_else(|| otherwise.to_owned())
}

/// Starts llama.cpp once per process and routes its log to `tracing`.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        // SAFETY: the callback is a plain function that lives for ever and
        // needs no user data; `Once` gives the order that both calls need.
        unsafe {
            sys::llama_log_set(Some(log), std::ptr::null_mut());
            sys::llama_backend_init();
        }
    });
    LAST_ERROR.with_borrow_mut(|error| *error = None);
}

unsafe extern "C" fn log(level: sys::ggml_log_level, text: *const c_char, _user: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: llama.cpp passes a zero-terminated string that lives for the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let line = text.trim_end();
    if level == sys::GGML_LOG_LEVEL_ERROR && !line.is_empty() {
        // A thread on its way out may have lost the place already.
        let _ = LAST_ERROR.try_with(|error| error.replace(Some(line.to_owned())));
    }
    if !line.is_empty() && line != "." {
        tracing::debug!(target: "engine::llama_cpp", level, line, "llama.cpp");
    }
}

fn c_path(path: &Path) -> Option<CString> {
    CString::new(path.as_os_str().as_encoded_bytes()).ok()
}

fn c_text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: callers pass zero-terminated strings owned by a live model or
    // GGUF context.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
