# `make demo` and `make test` are all a newcomer needs. Environments are made on first use, from the pins in constraints/.

PYTHON ?= python3
NEWEST := .venv
OLDEST := .venv-oldest
MEGATRON := .venv-megatron
VLLM := .venv-vllm
VLLM_WHEEL := $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m))
PYTEST := -m pytest -n 2 --dist worksteal -p no:cacheprovider
PROJECT := -e '.[transformers,dev]'

# A package index may be out of reach for a moment: three tries, then the error stands.
pip = for try in 1 2 3; do \
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints/$(2).txt $(3) && break; \
	if [ $$try = 3 ]; then echo "pip failed three times; see above" >&2; exit 1; fi; sleep 5; done

define environment
	@$(PYTHON) -c 'import sys; sys.exit("make needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(1)
	@echo "installing into $(1) (a few minutes)"
	@$(call pip,$(1),$(2),hatchling)
	@$(call pip,$(1),$(2),$(or $(3),$(PROJECT)))
	touch $@
endef

.PHONY: demo test lint test-newest test-oldest test-distributed test-megatron test-vllm bench clean

demo: $(NEWEST)/.stamp
	$(NEWEST)/bin/tracer demo

# Installing waits for the network, testing for the processor: side by side.
test: browser $(NEWEST)/.stamp
	@$(MAKE) --no-print-directory -j2 lint-and-newest $(OLDEST)/.stamp $(VLLM_WHEEL:%=$(VLLM)/.stamp)
	@$(MAKE) --no-print-directory test-oldest
	@$(MAKE) --no-print-directory test-distributed test-megatron
	@$(MAKE) --no-print-directory test-vllm

# Pages are looked at in Chromium. CI brings the distribution's package; elsewhere the tests say what to install.
.PHONY: browser
browser:
	@if [ "$$CI" = true ] && ! command -v chromium chromium-browser google-chrome >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; fi

.PHONY: lint-and-newest
lint-and-newest: lint
	@$(MAKE) --no-print-directory test-newest

lint: $(NEWEST)/.stamp
	$(NEWEST)/bin/ruff check .
	$(NEWEST)/bin/mypy

# Everything, with the newest transformers.
test-newest: $(NEWEST)/.stamp
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python $(PYTEST) -m 'not megatron and not distributed'

# What touches a model, with the oldest transformers.
test-oldest: $(OLDEST)/.stamp
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PYTEST) -m 'host and not newest and not megatron and not distributed'

# Sharded transformers models over gloo, two and four processes. No `-n`: the processes are the parallelism, here and below.
test-distributed: $(NEWEST)/.stamp
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -p no:cacheprovider -m distributed tests/distributed

# Megatron-core over gloo. Where its wheel does not exist, this says so and passes, but not in CI.
test-megatron:
	@if $(PYTHON) -c 'import sys; sys.exit(sys.platform != "linux")'; then \
		$(MAKE) --no-print-directory run-megatron; \
	elif [ "$$CI" = true ]; then \
		echo "test-megatron: megatron-core has a wheel for Linux only, and CI must not skip it" >&2; exit 1; \
	else \
		echo "test-megatron: skipped: megatron-core has a wheel for Linux only"; \
	fi

.PHONY: run-megatron
run-megatron: $(MEGATRON)/.stamp
	OMP_NUM_THREADS=1 $(MEGATRON)/bin/python -m pytest -p no:cacheprovider tests/megatron

# The vLLM engine itself, in an environment of its own. Where its wheel does not exist, this says so and passes, but not in CI.
ifdef VLLM_WHEEL
test-vllm: $(VLLM)/.stamp
	OMP_NUM_THREADS=1 $(VLLM)/bin/python $(PYTEST) --dist loadgroup tests/vllm
else
test-vllm:
	@echo "test-vllm: skipped: vLLM for the CPU has a wheel for Linux x86_64 only"
	@test "$$CI" != true
endif

bench: $(NEWEST)/.stamp
	$(NEWEST)/bin/python tools/bench_overhead.py

clean:
	rm -rf $(NEWEST) $(OLDEST) $(MEGATRON) $(VLLM) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(NEWEST)/.stamp: pyproject.toml constraints/common.txt constraints/newest.txt
	$(call environment,$(NEWEST),newest)

$(OLDEST)/.stamp: pyproject.toml constraints/common.txt constraints/oldest.txt
	$(call environment,$(OLDEST),oldest)

# Megatron-core on top of the newest environment, whose packages and commands it shares: what it depends on is there already.
$(MEGATRON)/.stamp: $(NEWEST)/.stamp constraints/megatron.txt
	$(PYTHON) -m venv --clear $(MEGATRON)
	@$(MEGATRON)/bin/python -c 'import sys, sysconfig; \
		open(sysconfig.get_path("purelib") + "/newest.pth", "w").write(f"import site; site.addsitedir({sys.argv[1]!r})")' \
		"$$($(NEWEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@for command in torchrun=torch.distributed.run tracer=tracer; do \
		printf '#!/bin/sh\nexec "$$(dirname "$$0")/python" -m %s "$$@"\n' "$${command#*=}" >$(MEGATRON)/bin/$${command%=*}; \
		chmod +x $(MEGATRON)/bin/$${command%=*}; \
	done
	@$(call pip,$(MEGATRON),megatron,--no-deps megatron-core)
	touch $@

# Every pin is in the file, so nothing is resolved. A dozen processes of the tests import it: compiled once, on all cores, that is quick.
$(VLLM)/.stamp: pyproject.toml constraints/vllm.txt
	$(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM into $(VLLM) (2 GB, two to four minutes)"
	@$(call pip,$(VLLM),vllm,--no-compile --no-deps -r constraints/vllm.txt)
	@$(call pip,$(VLLM),vllm,--no-deps -e .)
	@$(VLLM)/bin/python -m compileall -q -j 0 $(VLLM)/lib > /dev/null || true # some files are for other versions of Python
	touch $@
