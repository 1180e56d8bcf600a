# make demo | examples | check | test | durations | test-device | test-processors | mutants | bench | race | generality | held-out | lint | format | docs | package | clean
#
# Each target makes the virtual environment .venv, installs what it needs at the versions of constraints.txt and runs.
# A second run installs nothing. Options: PYTHON=python3.12, DEVICE=cuda (tests, demo and benchmarks read it),
# PYTEST_ARGS="-k conv -x".

PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist worksteal
SCRIPTS := $(filter-out examples/_% examples/demo.py examples/laplace_backend.py,$(wildcard examples/*.py))
RACES := tests/benchmarks/race.py tests/benchmarks/generality.py tests/benchmarks/held_out.py
BENCHMARKS ?= $(filter-out tests/benchmarks/_% $(RACES) $(addprefix tests/benchmarks/,bench_all.py figures.py gpu.py),$(wildcard tests/benchmarks/*.py))
RACE_ARGS ?= --json out/race.json
GENERALITY_ARGS ?= --json out/generality.json
HELD_OUT_ARGS ?= --json out/held_out.json

# Peers that ask for torchvision, see pyproject.toml.
ALONE := backpack-for-pytorch curvlinops-for-pytorch nngeometry laplace-torch asdfghjkl

BIN := .venv/bin
# Of some hundred megabytes of Python most is never imported: what is, is compiled then, and kept. Without that every
# process of a test would compile torch again, for ten seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile --prefer-binary -c constraints.txt

# One thread per test process: two processes with a thread pool each would fight for the cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest $(PYTEST_ARGS)

# What `make test` runs on the simulated accelerator; `make test-device` runs all tests that take a device.
ON_DEVICE := $(addprefix tests/,repository/test_simulated_device.py curvature/layers/test_rules.py \
	curvature/matrices/test_every_builder.py optimizers/test_every_optimizer.py integration/devices \
	optimizers/steps/test_launches_and_waits.py::test_the_host_waits_once)
SIMULATED := DEVICE=sim SIM_DEVICES=2 SIM_TF32=1

# What torch and its libraries may use of the processor: each rounds in another way.
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
SSE := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41

.PHONY: demo examples check fast test durations test-device test-processors kernels mutants bench bench-all figures race generality held-out lint format docs package clean
.DELETE_ON_ERROR:

demo: .venv/demo.stamp
	$(BIN)/python examples/demo.py

# The scripts of examples/, without what they kept last time, and docs/examples.md with what they print.
examples: .venv/test.stamp .venv/bench.stamp
	rm -rf out/attribution
	mkdir -p docs/results/examples
	@set -e; for file in $(SCRIPTS); do \
		echo "== $$file"; \
		case $$file in *_ddp.py) run="torchrun --standalone --nproc-per-node 2";; *) run=python;; esac; \
		$(BIN)/$$run $$file > docs/results/examples/$$(basename $$file .py).txt; \
	done
	@$(MAKE) --no-print-directory figures

# The inner loop: lint, types, and the tests marked `fast`, one case of each rule, builder, injection and optimizer.
check: .venv/test.stamp
	@$(MAKE) --no-print-directory -j2 lint fast

fast: .venv/test.stamp
	$(PYTEST) -q -m fast $$(grep -rl pytest.mark.fast tests --include='test_*.py')

# Everything. First what keeps one core busy, at once: lint, the peers' installation, the simulated device's compiler.
test: .venv/test.stamp
	@$(MAKE) --no-print-directory -j3 lint .venv/bench.stamp kernels
	$(PYTEST)
	$(SIMULATED) $(PYTEST) $(ON_DEVICE)

# The same; cases and seconds of each folder go to docs/results/tests.json, which `make test` leaves as it is.
durations:
	DURATIONS=$(CURDIR)/docs/results/tests.json $(MAKE) --no-print-directory test

# Everything that takes a device, on a simulated accelerator: two devices with CUDA's rules, and torch's own settings of
# precision. The first run compiles it for about a minute; without a C++ compiler or Python's headers all is skipped.
# On a real one: DEVICE=cuda make test-device
test-device: .venv/test.stamp
	$(if $(DEVICE),,$(SIMULATED)) $(PYTEST)

# Tests that one rounding or one order of the data could decide: those of the optimizers and all training runs, as on
# other processors; then the training runs with other batches.
test-processors: .venv/test.stamp
	@set -e; for processor in "$(SSE)" "$(AVX2)" ""; do \
		echo "== $${processor:-this processor}"; \
		env $$processor $(PYTEST) tests/optimizers; \
		env $$processor $(PYTEST) -m training_run $$(grep -rl mark.training_run tests --include='test_*.py' --exclude-dir=optimizers); \
	done; \
	for order in 1 2; do \
		echo "== order $$order of the data"; \
		DATA_ORDER=$$order $(PYTEST) -m training_run $$(grep -rl mark.training_run tests --include='test_*.py'); \
	done

# The simulated device; where it cannot be compiled, its tests say why they are skipped.
kernels: .venv/test.stamp
	@PYTHONPATH=tests $(BIN)/python -m support.simulated_device.build

# The code of pyproject's [tool.mutmut] broken at one place at a time, in the folder mutants: do the fast tests see it?
# Those that they do not see are listed; `.venv/bin/mutmut show NAME` has the change.
# MUTANTS="curvature.terms.contractions*"
mutants: .venv/test.stamp .venv/mutation.stamp
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/mutmut run $(MUTANTS)
	$(BIN)/mutmut results

bench: .venv/bench.stamp
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file; done

# All benchmarks whose figures the pages have, into docs/results/; goes on where it stopped. Then the pages themselves.
bench-all: .venv/bench.stamp
	$(BIN)/python tests/benchmarks/bench_all.py $(BENCH_ALL_ARGS)
	@$(MAKE) --no-print-directory figures

figures: .venv/bench.stamp
	$(BIN)/python tests/benchmarks/figures.py

# With the settings in tests/benchmarks/race_tuned.json; RACE_ARGS=--tune finds them anew.
race: .venv/bench.stamp
	mkdir -p out
	$(BIN)/python tests/benchmarks/race.py $(RACE_ARGS)

# Sixteen families of problems, half an hour; settings of rivals as above, in generality_tuned.json.
generality: .venv/bench.stamp
	mkdir -p out
	$(BIN)/python tests/benchmarks/generality.py $(GENERALITY_ARGS)

# Twelve problems and five tables judged by held-out data, two hours; settings of rivals in held_out_tuned.json.
held-out: .venv/bench.stamp
	mkdir -p out
	$(BIN)/python tests/benchmarks/held_out.py $(HELD_OUT_ARGS)

lint: .venv/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/test.stamp
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The site, and each of its pages in headless Chromium, which Debian has in chromium-driver; without it the pages are not
# opened. site/index.html needs no server, its search does: python3 -m http.server -d site
docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/config/mkdocs.yml
	SITE=site $(BIN)/python -m pytest -q tests/repository/test_site.py

# sdist and wheel, and the wheel in an empty environment, as users install it: without constraints.txt, with the newest
# torch. Its default build brings gigabytes of CUDA, so a machine that cannot install that may pin torch, and only torch:
#     echo "torch==2.13.0+cpu" > torch.txt && PIP_CONSTRAINT=$PWD/torch.txt make package
# VERSIONS="3.10:2.11.0 3.13:" tries other versions of Python and torch there (none: the newest), with the fast tests.
package: .venv/test.stamp
	$(BIN)/python tests/support/versions.py $(VERSIONS)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build mutants site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/%.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing what \`$*\` needs into .venv (once)"
	@$(PIP) -e ".[$*]"
	@$(if $(filter bench,$*),$(PIP) --no-deps $(ALONE))
	@touch $@
