#!/usr/bin/env bash
# Installs what the build needs and this machine lacks, on Debian and Ubuntu:
# cmake and a C++ compiler for llama.cpp, libclang for its bindings, Python's
# pip and venv for models and client tests. Says nothing when nothing is missing.
set -euo pipefail

missing=()

have_libclang() {
  [ -n "${LIBCLANG_PATH:-}" ] || ldconfig -p 2>/dev/null | grep -Eq 'libclang(-[0-9.]+)?\.so' ||
    compgen -G '/usr/lib/llvm-*/lib/libclang[-.][0-9s]*' >/dev/null
}

# bindgen asks clang for the compiler's own headers (stddef.h and friends).
have_clang_headers() {
  compgen -G '/usr/lib/llvm-*/lib/clang/*/include/stddef.h' >/dev/null ||
    compgen -G '/usr/lib/clang/*/include/stddef.h' >/dev/null
}

have_venv() {
  python3 -c 'import ensurepip, venv' 2>/dev/null
}

command -v cmake >/dev/null || missing+=(cmake)
command -v c++ >/dev/null || missing+=(g++)
command -v make >/dev/null || missing+=(make)
{ have_libclang && have_clang_headers; } || missing+=(clang libclang-dev)
command -v python3 >/dev/null || missing+=(python3)
python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
have_venv || missing+=(python3-venv)

if [ "${#missing[@]}" -gt 0 ]; then
  if ! command -v apt-get >/dev/null; then
    printf 'setup: install these with your package manager, then try again: %s\n' "${missing[*]}" >&2
    exit 1
  fi
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      printf 'setup: run as root: apt-get install %s\n' "${missing[*]}" >&2
      exit 1
    fi
    as_root=(sudo)
  fi
  printf 'setup: installing %s\n' "${missing[*]}" >&2
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${missing[@]}" >/dev/null
fi

if ! command -v cargo >/dev/null; then
  printf 'setup: Rust is missing: install it from https://rustup.rs, then try again\n' >&2
  exit 1
fi
