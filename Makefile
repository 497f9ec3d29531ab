# Builds, tests and measures Ritornello. Each target first builds what it needs, and rebuilds only
# what has changed.
#
# .venv               Python 3.11 or later with the package, NumPy and the tools
# build/env/ENGINE    a serving engine's environment
# build/s3            S3 servers for tests
# build/emulators     emulators of Google Cloud Storage and Azure Blob Storage for tests
# build/rocksdb       RocksDB for the feature `lsm`, and the variables with which cargo finds it
# build/stamps        one file per built target, touched when it was built; logs and times of suites
# target              cargo's build folder

PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3))
CARGO ?= cargo
# The part of the suites that `test-all` runs: SHARD=2/3 is the second of three parts.
SHARD ?= 1/1
# Folder in which `bench` creates its stores: on the disk to measure.
DIR ?= build

VENV := .venv
BIN := $(VENV)/bin
STAMPS := build/stamps
VLLM := build/env/vllm
LMCACHE := build/env/lmcache
SGLANG := build/env/sglang
MOONCAKE := build/env/mooncake
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Lets Python keep compiled modules, also if the caller's environment forbids it: each process of an
# engine imports thousands of modules.
export PYTHONDONTWRITEBYTECODE :=

RUST_SOURCES := Cargo.toml Cargo.lock $(shell find crates -name '*.rs' -not -path '*/tests/*' -o -name Cargo.toml) \
	$(wildcard crates/device/kernels/*.cpp crates/device/kernels/kv.*)
PYTHON_SOURCES := pyproject.toml README.md $(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed)
# RocksDB's own build for Java, of the version that the crate `rocksdb` in Cargo.toml expects: one
# shared library, which also exports the whole C interface. If it cannot be fetched, or with
# `ROCKSDB=source`, cargo compiles RocksDB, which takes tens of minutes.
LSM := build/rocksdb$(if $(filter source,$(ROCKSDB)),-source)
ROCKSDB_ARTIFACT := org.rocksdb:rocksdbjni:11.8.1
ROCKSDB_SHA256 := 265c656af5c6502cb8d71db1a74858509f706cc47f1a5b6f603c736d11ce677d
# The build script of the crate `rocksdb` reads C headers with libclang. PyPI's package
# `libclang` lacks the compiler's own headers, so the script reads gcc's.
LIBCLANG := libclang==18.1.1
# Most checks use the same features, so that cargo compiles each crate once for them. The wheel in
# build/wheels is built without features.
FEATURES := --features ritornello-python/lsm,ritornello-python/emulated

# Pattern of the wheel's path, which the shell expands. The folder has one wheel, whose name contains
# the version.
WHEEL := build/wheels/ritornello-*.whl

# Runs test binaries through .cargo/run_test.py, which ends a binary that prints nothing for
# TEST_SILENCE seconds (600 by default), and names the tests that the binary was running.
# PATH begins with the environment's Python, because the `python3` of a version manager may take ten
# times as long to start the script.
CARGO_TEST := PATH=$(CURDIR)/$(BIN):$$PATH $(CARGO) --config .cargo/tests.toml test
test-rust-long test-remote: export TEST_SILENCE := 1800

# `test-all` runs all suites, or its shard of them; `test` runs CORE_SUITES, `test-vllm` and
# `test-loom`. Suites of the core run one at a time, because some of them keep two processors busy at
# times. Most tests of the core only wait, so the other suites, which mostly keep one processor busy,
# run beside the suites of the core: two at a time, long suites first. Both sequences of suites take
# about the same time.
CORE_SUITES := test-rust test-python test-lsm
LONG_CORE_SUITES := test-python-long
OTHER_SUITES := test-vllm-connector test-sglang-long test-vllm-tier test-shared test-lmcache test-loom test-serve-demo \
	test-device test-remote test-rust-long test-fuzz test-service test-sglang test-mooncake lint-dependencies
ENGINES := vllm sglang lmcache mooncake
shard = $(shell echo $(1) | tr ' ' '\n' | awk -v shard=$(SHARD) \
	'BEGIN { split(shard, s, "/") } NR % s[2] == s[1] % s[2]')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv rocksdb build service-tools cargo-deny lint-dependencies wheel wheel-lsm wheel-device emulated binary-lsm vllm sglang lmcache s3 emulators mooncake packages test test-all \
	$(CORE_SUITES) $(LONG_CORE_SUITES) test-vllm $(OTHER_SUITES) rust-tests lint lint-deploy format demo demo-sglang demo-lmcache serve-demo bench bench-shared clean

help: ## prints this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# ---- set-up

venv: $(STAMPS)/venv ## .venv with the tools, without the package
$(STAMPS)/venv: requirements-dev.txt
	@mkdir -p $(STAMPS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@

rocksdb: $(LSM)/env ## RocksDB in build/rocksdb, for the feature `lsm`; with ROCKSDB=source cargo compiles it
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
		echo "RocksDB cannot be fetched (fetching needs mvn and x86-64): cargo will compile it, in tens of minutes" >&2; \
	fi
endif
	mv $(LSM)/variables $@

wheel: $(STAMPS)/wheel ## the package as a wheel in build/wheels, its debug symbols in build/symbols
$(STAMPS)/wheel: $(STAMPS)/venv $(RUST_SOURCES) $(PYTHON_SOURCES) packaging/strip_wheel.py THIRD_PARTY_NOTICES
	rm -rf build/wheels build/symbols
	$(BIN)/maturin build --release --quiet --strip false --out build/wheels --interpreter $(BIN)/python
	$(BIN)/python packaging/strip_wheel.py $(WHEEL) build/symbols
	@touch $@

# The wheel contains a copy of RocksDB's library, which the installed package loads.
wheel-lsm: $(STAMPS)/wheel-lsm ## the package with the index `lsm` in it, in build/wheels-lsm
$(STAMPS)/wheel-lsm: $(LSM)/env $(RUST_SOURCES) $(PYTHON_SOURCES)
	rm -rf build/wheels-lsm
	. $(LSM)/env && PATH=$(CURDIR)/$(BIN):$$PATH maturin build --release --quiet --features lsm --auditwheel repair \
		--out build/wheels-lsm --interpreter $(BIN)/python
	@touch $@

# The package is also installed into build/wheels-device/site. Measurements put this folder first on
# PYTHONPATH, so the package needs no environment of its own. The wheel is built after `wheel`: maturin
# takes the compiled module from cargo's build folder, where the build of another wheel would replace it.
wheel-device: $(STAMPS)/wheel-device ## the package with an emulated GPU, for measurements, in build/wheels-device
$(STAMPS)/wheel-device: $(STAMPS)/venv $(RUST_SOURCES) $(PYTHON_SOURCES) | $(STAMPS)/wheel
	rm -rf build/wheels-device
	$(BIN)/maturin build --release --quiet --features emulated --out build/wheels-device --interpreter $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps --target build/wheels-device/site build/wheels-device/ritornello-*.whl
	@touch $@

# The package with an emulated GPU, for tests. Its module is compiled with the settings of Rust's
# tests: once these tests are built, the module takes seconds, whereas `wheel-device` takes minutes.
emulated: rust-tests
	. $(LSM)/env && $(CARGO) build --workspace --lib --examples $(FEATURES) --locked --quiet
	rm -rf build/emulated
	mkdir -p build/emulated
	cp -r python/ritornello build/emulated/
	cp target/debug/lib_core.so build/emulated/ritornello/_core.abi3.so

# The program loads RocksDB's library from the folder $(LSM) of this checkout, its run path.
binary-lsm: $(LSM)/env ## `ritornello` with all indexes, for `ritornello bench index`
	. $(LSM)/env && $(CARGO) rustc --release --locked --quiet \
		-p ritornello-cli --bin ritornello --features lsm,art -- -C link-arg=-Wl,-rpath,$(CURDIR)/$(LSM)
	@echo target/release/ritornello

build: $(STAMPS)/build ## the package, installed in .venv
$(STAMPS)/build: $(STAMPS)/wheel
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall $(WHEEL)
	@touch $@

# An engine's environment is built in two steps, so that with `make --jobs 2` its packages are
# fetched while the wheel is compiled.
vllm: ## a real vLLM for CPUs with the package, in build/env/vllm
lmcache: ## a real LMCache for CPUs with the package, in build/env/lmcache
sglang: ## a real SGLang for CPUs with the package, in build/env/sglang
mooncake: ## a real Mooncake for CPUs with the package, in build/env/mooncake
$(ENGINES): %: $(STAMPS)/%
$(foreach engine,$(ENGINES),$(eval $(STAMPS)/$(engine)-packages: $(shell find engines/$(engine) -type f -not -name '*.pyc')))
$(STAMPS)/lmcache-packages $(STAMPS)/sglang-packages: engines/vllm/make_cuda_stubs.py
$(ENGINES:%=$(STAMPS)/%-packages): $(STAMPS)/%-packages: engines/environment.sh
	@mkdir -p $(STAMPS)
	engines/$*/build.sh
	@touch $@
$(ENGINES:%=$(STAMPS)/%): $(STAMPS)/%: $(STAMPS)/%-packages $(STAMPS)/wheel
	engines/$*/build.sh --wheel $(WHEEL)
	@touch $@

s3: $(STAMPS)/s3 ## S3 servers for tests, VersityGW and MinIO, in build/s3; needs go
$(STAMPS)/s3: engines/s3/build.sh
	@mkdir -p $(STAMPS)
	engines/s3/build.sh
	@touch $@

emulators: $(STAMPS)/emulators ## emulators of Google's and Azure's storage, in build/emulators; needs go and npm
$(STAMPS)/emulators: engines/emulators/build.sh
	@mkdir -p $(STAMPS)
	engines/emulators/build.sh
	@touch $@

# ---- checks

# Runs a suite, prints its output when it ends, and records its result, its duration and its CPU time.
# All suites run, also after a failure. What failed, and then all results, are printed last, where a
# reader looks first. The second line that the shell's `times` prints is the CPU time of ended child
# processes: user, then system.
TIMES := $(STAMPS)/times
timed-%:
	@began=$$(date +%s); $(MAKE) --no-print-directory $* >$(STAMPS)/$*.log 2>&1 && result=passed || result=FAILED; \
	times >$(STAMPS)/$*.cpu; cpu=$$(awk -F '[ms ]+' 'END { print int(60 * ($$1 + $$3) + $$2 + $$4) }' $(STAMPS)/$*.cpu); \
	cat $(STAMPS)/$*.log; echo "$* $$result after $$(($$(date +%s) - began)) s ($$cpu s of CPU time)" | tee -a $(TIMES); \
	test $$result = passed
# Lines of a log that begin the report of a failed test or build.
FAILURE := ^---- .* stdout ----$$|^(FAILED|ERROR) |^error(\[|:)|^make.* Error
define summary
sed -n 's/ FAILED after .*//p' $(TIMES) | while read -r suite; do \
	echo "failures of $$suite:"; grep -E -A 6 '$(FAILURE)' $(STAMPS)/$$suite.log | head -n 60; done; cat $(TIMES)
endef

# Runs the suites $(2), $(1) at a time.
run_suites = $(MAKE) --no-print-directory --keep-going --jobs $(1) --output-sync=target $(addprefix timed-,$(2))

# Builds the targets $(1), and then runs the suites $(2) one at a time beside the suites $(3).
# All targets are built before the suites run, because two suites that run at a time may need the same
# environment. Three targets are built at a time, because some fetch while others compile; `rust-tests`
# is the first, because it takes longest.
build_and_run = mkdir -p $(STAMPS) && : >$(TIMES); status=0; began=$$(date +%s); \
	$(MAKE) --no-print-directory --keep-going --jobs 3 rust-tests $(1) || status=1; \
	echo "builds ended after $$(($$(date +%s) - began)) s" | tee -a $(TIMES); \
	{ $(call run_suites,1,$(2)); } & core=$$!; \
	$(call run_suites,2,$(3)) || status=1; wait $$core || status=1; $(summary); exit $$status

test: ## all tests of the core, of Python and of vLLM, except long tests
	@$(call build_and_run,build vllm,$(CORE_SUITES),test-vllm test-loom)

test-all: ## all tests, also of SGLang, LMCache, Mooncake and remotes; SHARD=2/3 runs the second third
	@$(call build_and_run,packages build emulated $(ENGINES) s3 emulators service-tools cargo-deny,$(call \
		shard,$(CORE_SUITES) $(LONG_CORE_SUITES)),$(call shard,$(OTHER_SUITES)))

# The environments of all engines, without the package `ritornello`; and the sources of the other
# tested release of vLLM, LMCache and SGLang.
packages: $(ENGINES:%=$(STAMPS)/%-packages) $(STAMPS)/sources
$(STAMPS)/sources: engines/sources.sh
	@mkdir -p $(STAMPS)
	engines/sources.sh vllm 0.33.0
	engines/sources.sh lmcache 0.5.5
	engines/sources.sh sglang 0.5.22
	@touch $@

rust-tests: $(LSM)/env
	. $(LSM)/env && $(CARGO_TEST) --workspace $(FEATURES) --locked --quiet --no-run

# `--tests` omits examples in documentation: there are none, and rustdoc would read all crates.
test-rust: $(LSM)/env
	. $(LSM)/env && $(CARGO_TEST) --workspace $(FEATURES) --locked --quiet --no-fail-fast --tests

# Skips `allocation_time_with_a_million_holes` and `explanation_time_of_256_keys`, measurements that
# assert nothing.
test-rust-long: $(LSM)/env
	. $(LSM)/env && $(CARGO_TEST) --workspace $(FEATURES) --locked --quiet --no-fail-fast --lib --tests -- --ignored \
		--skip allocation_time_with_a_million_holes --skip explanation_time_of_256_keys

# The tests of store, node and cli, with `lsm` as the index; a soak among them kills the store's
# owner. Left out are: files whose tests would only repeat test-rust, because they use no index or
# choose their index; some files of tests on a simulated disk, whose stores always have the index
# `run`, because RocksDB would write past the simulated disk; tests with a store that is too small or
# too full for RocksDB's files; and `clients_recover_from_every_fault`, in which RocksDB opens too
# slowly on a busy machine.
NOT_LSM_TESTS := bench bench_% hostile loom_% mapped remote simulate usage \
	conversion fixtures \
	absence clean_end crash damaged_segments dead_writers faults holds partial_changes scope_registry \
	segment_names space_returns steady \
	full full_stripes full_uneven_disks
LSM_TESTS := $(filter-out $(NOT_LSM_TESTS),$(sort $(basename $(notdir \
	$(wildcard crates/store/tests/*.rs crates/node/tests/*.rs crates/cli/tests/*.rs)))))
test-lsm: $(LSM)/env
	. $(LSM)/env && RITORNELLO_TEST_INDEX=lsm $(CARGO_TEST) --workspace $(FEATURES) --locked --quiet --no-fail-fast \
		$(addprefix --test ,$(LSM_TESTS)) -- --skip clients_recover_from_every_fault

# Loom models are crates/*/tests/loom_*.rs.
test-loom: $(LSM)/env
	. $(LSM)/env && $(CARGO_TEST) --workspace $(FEATURES),ritornello-store/loom --locked --quiet --test 'loom_*'

# Runs every parser on broken input, each for FUZZ_SECONDS seconds. `--examples` makes cargo enable the
# features of dependencies that tests enable, so that it does not compile dependencies again.
FUZZ_SECONDS ?= 5
test-fuzz: $(LSM)/env
	. $(LSM)/env && $(CARGO) build --workspace --bins --examples $(FEATURES) --locked --quiet \
		&& target/debug/ritornello-fuzz $(FUZZ_SECONDS)

# The remote tier over real servers, and over a proxy that injects faults. AZURE_STORAGE_ACCOUNT_KEY is
# the published key of Azurite, the emulator of Azure Blob Storage.
test-remote: $(STAMPS)/s3 $(STAMPS)/emulators $(LSM)/env
	. $(LSM)/env && AWS_SHARED_CREDENTIALS_FILE=$(CURDIR)/crates/remote/tests/credentials \
		AZURE_STORAGE_ACCOUNT_KEY=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw== \
		$(CARGO_TEST) --workspace \
		$(FEATURES),ritornello-remote/servers --locked --quiet --test servers -- --test-threads 1

# The remote tier over a real Mooncake.
test-mooncake: $(STAMPS)/mooncake
	$(MOONCAKE)/bin/python -m pytest tests/engines/mooncake -q || [ $$? -eq 5 ]

# Warnings are errors. Exit code 5 (no test was selected) is not an error of a suite of long tests,
# nor of `test-mooncake`, which is skipped where Mooncake cannot be loaded.
PYTEST := $(BIN)/python -m pytest tests/python -q -W error --timeout 120
test-python: $(STAMPS)/build
	$(PYTEST) -m "not long"

test-python-long: $(STAMPS)/build
	$(PYTEST) -m long --timeout 1200 || [ $$? -eq 5 ]

# The node service: schemathesis against its OpenAPI document, a real Prometheus with the packaged
# dashboard and alerts, and the packaged files for systemd and Kubernetes. Tests whose tool is missing
# are skipped with a message.
SERVICE := $(CURDIR)/build/env/service
service-tools: $(STAMPS)/service-tools ## schemathesis and kubernetes-validate, in build/env/service
$(STAMPS)/service-tools: tests/service/requirements.txt
	@mkdir -p $(STAMPS)
	rm -rf $(SERVICE)
	$(PYTHON) -m venv $(SERVICE)
	$(SERVICE)/bin/python -m pip install --quiet -r tests/service/requirements.txt
	@touch $@

test-service: $(STAMPS)/build lint-deploy
	SCHEMATHESIS=$(SERVICE)/bin/schemathesis \
		$(BIN)/python -m pytest tests/service -q -W error --timeout 900 --ignore tests/service/test_deployment.py

lint-deploy: $(STAMPS)/build $(STAMPS)/service-tools ## the files of packaging/, by the tools that read them
	KUBERNETES_VALIDATE=$(SERVICE)/bin/kubernetes-validate \
		$(BIN)/python -m pytest tests/service/test_deployment.py -q -W error --timeout 300

# Loads and saves of an emulated GPU: from Python, by the benchmark, and by a vLLM for CPUs whose memory
# is the emulated GPU's.
EMULATED := . $(LSM)/env && PYTHONPATH=$(CURDIR)/build/emulated RITORNELLO_TEST_DEVICE=emulated
test-device: emulated $(STAMPS)/vllm-packages
	$(EMULATED) $(BIN)/python -m pytest tests/python/test_device.py -q -W error --timeout 120
	rm -rf build/gpu-report
	$(EMULATED) $(VLLM)/bin/python benches/gpu.py --emulated --out build/gpu-report --dir build
	$(EMULATED) RITORNELLO_DEVICE=emulated $(VLLM)/bin/python -m pytest -q -m "not long" \
		tests/engines/vllm/test_async_loads.py tests/engines/vllm/test_one_process.py

test-vllm: $(STAMPS)/vllm $(STAMPS)/sources
	$(VLLM)/bin/python -m pytest tests/engines/vllm -q -m "not long"
	$(VLLM)/bin/python -m pytest tests/engines/vllm_tier -q -m "not long"
	$(VLLM)/bin/python -m pytest tests/python/test_tensors.py -q

# All tests of vLLM, long tests too, in two suites: the tests of a suite share imports of vLLM, which
# take longer than most tests.
test-vllm-connector: $(STAMPS)/vllm $(STAMPS)/sources
	$(VLLM)/bin/python -m pytest tests/engines/vllm -q
	$(VLLM)/bin/python -m pytest tests/python/test_tensors.py -q

test-vllm-tier: $(STAMPS)/vllm $(STAMPS)/sources $(STAMPS)/s3
	$(VLLM)/bin/python -m pytest tests/engines/vllm_tier -q

# The short form of `bench-shared`: checks hits by tier and equal answers, and measures no times.
test-shared: $(STAMPS)/build $(STAMPS)/vllm $(STAMPS)/s3
	$(BIN)/python -m benches.shared --short

# The short form of `serve-demo`: the node service explains the requests of a real vLLM.
test-serve-demo:
	@$(MAKE) --no-print-directory serve-demo CHECK=1

test-lmcache: $(STAMPS)/lmcache $(STAMPS)/sources
	$(LMCACHE)/bin/python -m pytest tests/engines/lmcache -q

test-sglang: $(STAMPS)/sglang $(STAMPS)/sources
	$(SGLANG)/bin/python -m pytest tests/engines/sglang -q -m "not long"

test-sglang-long: $(STAMPS)/sglang $(STAMPS)/s3
	$(SGLANG)/bin/python -m pytest tests/engines/sglang -q -m long || [ $$? -eq 5 ]

# Compiled without optimization and debug information, in less than a third of the time that
# optimization takes. `lint-dependencies` does not check RustSec's advisories (`$(DENY) check
# advisories`), because many machines do not reach their server.
DENY := build/deny/bin/cargo-deny
cargo-deny: $(DENY) ## cargo-deny, in build/deny
$(DENY):
	CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=$(CURDIR)/build/deny/target $(CARGO) install cargo-deny --version 0.20.2 --locked --debug --quiet --root build/deny
	rm -rf build/deny/target

lint-dependencies: $(DENY) ## licenses and sources of all crates, by the rules in deny.toml
	$(DENY) check licenses bans sources

lint: $(STAMPS)/venv $(LSM)/env ## formatting, words, imports, clippy, licenses, ruff and mypy; warnings are errors
	$(CARGO) fmt --all --check
	$(BIN)/python crates/store/tests/explorer/mutations.py --check
	$(BIN)/python tests/python/words.py
	$(BIN)/python tests/python/imports.py
	. $(LSM)/env && $(CARGO) clippy --workspace --all-targets $(FEATURES),ritornello-remote/servers --locked --quiet \
		-- --deny warnings
	$(BIN)/python packaging/notices.py --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMPS)/venv ## repairs what tools can repair of the findings of `lint`
	$(CARGO) fmt --all
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

# ---- demonstrations and benchmarks

demo: ## a real vLLM answers long prompts with an empty store, with the filled store, and without Ritornello
	@$(MAKE) --no-print-directory --jobs 2 $(STAMPS)/build $(STAMPS)/demo-model $(STAMPS)/vllm
	$(BIN)/python -m demo

serve-demo: ## a real vLLM under a chat load, beside the node service of its store, until Ctrl-C; with CHECK=1 a short check
	@$(MAKE) --no-print-directory --jobs 2 $(STAMPS)/build $(STAMPS)/demo-model $(STAMPS)/vllm
	$(BIN)/python -m demo.serve $(if $(filter 1,$(CHECK)),--check)

$(STAMPS)/demo-model: $(STAMPS)/vllm-packages engines/vllm/make_model.py
	$(VLLM)/bin/python engines/vllm/make_model.py demo build/demo/model
	@touch $@

demo-lmcache: $(STAMPS)/build $(STAMPS)/lmcache ## a real LMCache server is restarted, and finds the objects that it stored before
	$(BIN)/python -m demo.lmcache

demo-sglang: $(STAMPS)/build $(STAMPS)/sglang ## two real SGLang servers, one after the other: the second finds the pages that the first stored
	$(BIN)/python -m demo.sglang

bench: $(STAMPS)/build ## the disk's limits, and the store's rates relative to them; DIR is on the disk to measure
	$(BIN)/ritornello bench store --shape llama3-8b --page-tokens 64 --total 2GiB --dir $(DIR)
	$(BIN)/ritornello bench store --shape qwen2.5-0.5b --page-tokens 16 --total 2GiB --dir $(DIR)

bench-shared: $(STAMPS)/build $(STAMPS)/vllm $(STAMPS)/s3 ## two real vLLM servers that share tiers, under multi-round QA: 30 minutes
	$(BIN)/python -m benches.shared

clean: ## removes everything that was built, engine environments included
	rm -rf $(VENV) build target .mypy_cache .pytest_cache .ruff_cache
