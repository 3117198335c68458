# Everything a newcomer types. Every cargo command uses the release profile, so
# that llama.cpp is compiled once.

SHELL := /bin/bash
CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
SEGUE := $(TARGET)/release/segue
CACHE := $(or $(SEGUE_CACHE),$(HOME)/.cache/segue)
OPENAI_VENV := $(CACHE)/venv-openai
LISTEN ?= 127.0.0.1:8080

.PHONY: help run build models models-test test lint unit openai-client test-hosts hosts-if-possible soak sim
.PHONY: fuzz fuzz-briefly fuzz-seeds bench

help:
	@echo 'make run     install what is missing, build, fetch the demo model, start a mesh, show a demo'
	@echo '             (another address: make run LISTEN=127.0.0.1:9000)'
	@echo 'make test    everything that CI checks: format, lints, docs, tests with real models'
	@echo 'make test-hosts   a mesh over five network namespaces (part of make test where they can be made)'
	@echo 'make soak    random faults and many requests on a real mesh (SECONDS=600 each)'
	@echo 'make sim     a million requests in virtual time, under faults, every answer checked (SEEDS=2200)'
	@echo 'make fuzz    every decoder, fed with damaged input (FUZZ_SECONDS=600 each; briefly in make test)'
	@echo 'make bench   inverse arrival against a running mesh (URL=http://127.0.0.1:8080)'
	@echo 'make build   only build'
	@echo 'make models  only fetch the demo model'

run: build models
	@exec python3 scripts/demo.py $(SEGUE) --listen $(LISTEN)

build:
	@scripts/setup.sh
	@echo 'build: segue (the first time, this compiles llama.cpp: several minutes)' >&2
	@$(CARGO) build --release --locked -p segue

models: build
	@SEGUE_BIN=$(SEGUE) scripts/fetch-models.sh demo

models-test: build
	@SEGUE_BIN=$(SEGUE) scripts/fetch-models.sh demo test

test: lint unit fuzz-briefly hosts-if-possible

lint:
	@scripts/setup.sh
	$(CARGO) fmt --all --check
	$(CARGO) fmt --all --check --manifest-path fuzz/Cargo.toml
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --release --locked --workspace --no-deps --document-private-items --quiet

unit: models-test openai-client
	SEGUE_OPENAI_PYTHON=$(OPENAI_VENV)/bin/python $(CARGO) test --release --locked --workspace

# Router and nodes in network namespaces, joined by links that are limited and
# cut. Needs root and iproute2.
test-hosts: models
	$(CARGO) test --release --locked -p segue --test hosts -- --ignored --nocapture

hosts-if-possible: models
	@if scripts/can-make-hosts.sh 2>/dev/null; then $(MAKE) test-hosts; \
	else echo '*** test-hosts SKIPPED: no network namespaces here (needs root and iproute2)' >&2; fi

SECONDS ?= 600
soak: models
	SEGUE_SOAK_SECONDS=$(SECONDS) $(CARGO) test --release --locked -p segue --test soak -- --ignored --nocapture --test-threads 1

# In virtual time on all cores; some seconds per hundred seeds.
SEEDS ?= 2200
sim: build
	$(SEGUE) sim --seeds $(SEEDS) --requests 450

# One target per decoder, in fuzz/targets. Its build has a folder of its own: the
# decoders are compiled again, with counters in every branch.
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?=
FUZZ_DIR := $(CACHE)/fuzz-target
CARGO_FUZZ_VERSION := 0.13.2
CARGO_FUZZ := $(CACHE)/cargo-fuzz-$(CARGO_FUZZ_VERSION)/bin/cargo-fuzz

fuzz: $(CARGO_FUZZ)
	@CARGO_FUZZ=$(CARGO_FUZZ) CARGO_TARGET_DIR=$(FUZZ_DIR) scripts/fuzz.sh $(FUZZ_SECONDS) $(FUZZ_TARGETS)

fuzz-briefly:
	@$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=2

fuzz-seeds:
	CARGO_TARGET_DIR=$(FUZZ_DIR) $(CARGO) run --release --locked --manifest-path fuzz/Cargo.toml --example seeds

$(CARGO_FUZZ):
	@scripts/setup.sh
	@echo 'fuzz: installing cargo-fuzz $(CARGO_FUZZ_VERSION)' >&2
	@$(CARGO) install cargo-fuzz --version $(CARGO_FUZZ_VERSION) --locked --quiet --root $(dir $(@D)) --target-dir $(CACHE)/cargo-fuzz-build
	@rm -rf $(CACHE)/cargo-fuzz-build

# The official OpenAI client, in an environment of its own: system Pythons
# refuse packages from outside (PEP 668).
openai-client: $(OPENAI_VENV)/installed

$(OPENAI_VENV)/installed: scripts/requirements-openai.txt
	@scripts/setup.sh
	@echo 'test: installing the OpenAI client into $(OPENAI_VENV)' >&2
	@python3 -m venv $(OPENAI_VENV)
	@$(OPENAI_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

URL ?= http://127.0.0.1:8080
bench: build
	@$(SEGUE) bench inverse-arrival --url $(URL)
