#!/usr/bin/env bash
# Runs every fuzz target for SECONDS_EACH in turn, on a copy of its corpus.
# Stops at the first finding and says how to repeat it.
#
#   fuzz.sh SECONDS_EACH [TARGET...]
#
# CARGO_FUZZ is the cargo-fuzz program, CARGO_TARGET_DIR where the build goes.
# With FUZZ_MERGE=1, inputs that reach something new are added to the corpus.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=$1
shift

# cargo fuzz has no --locked.
if ! cargo metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null 2>&1; then
  printf '%s\n' 'fuzz: fuzz/Cargo.lock does not fit the manifests; this brings it up to date, then commit it:' \
    '  cargo update --workspace --manifest-path fuzz/Cargo.toml' >&2
  exit 1
fi

# No sanitizer: they need a nightly compiler, and the decoders hold no unsafe
# code. No cfg(fuzzing): under it some dependencies leave their checks out.
"$CARGO_FUZZ" build --sanitizer none --no-cfg-fuzzing --fuzz-dir fuzz

targets=("$@")
if [ "${#targets[@]}" -eq 0 ]; then
  mapfile -t targets < <(find fuzz/targets -name '*.rs' -printf '%f\n' | sed 's/\.rs$//' | sort)
fi
programs=$CARGO_TARGET_DIR/$(rustc -vV | sed -n 's/^host: //p')/release
findings=$CARGO_TARGET_DIR/findings
mkdir -p "$findings"
# What a run finds on its way stays out of the tree.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for target in "${targets[@]}"; do
  program=$programs/$target
  log=$work/$target.log
  mkdir "$work/$target"
  # The slowest input of the corpus takes milliseconds. 64 KiB are longer than
  # anything that branches on its length.
  if ! "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=65536 \
    -print_final_stats=1 -artifact_prefix="$findings/$target-" \
    "$work/$target" "fuzz/corpus/$target" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    input=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
    printf '\nfuzz: %s fails on %s\nfuzz: repeat it with: %s %s\n' \
      "$target" "${input:-?}" "$program" "${input:-?}" >&2
    exit 1
  fi
  if [ -n "${FUZZ_MERGE:-}" ]; then
    # Few and short: one input for each branch, not for each count of turns.
    "$program" -set_cover_merge=1 -use_counters=0 -max_len=400 "fuzz/corpus/$target" "$work/$target" >>"$log" 2>&1
  fi
  executed=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | head -n 1)
  printf 'fuzz: %-16s %9s inputs in %s s\n' "$target" "${executed:-?}" "$seconds"
done
