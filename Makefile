# Every target works on a fresh clone with Python 3.11+, make and git.
PYTHON ?= python3
# The active conda or virtual environment if it has what is needed, else .venv.
ACTIVE := $(filter-out $(CURDIR)/.venv,$(or $(VIRTUAL_ENV),$(CONDA_PREFIX)))
BIN := $(or $(if $(ACTIVE),$(shell "$(ACTIVE)/bin/python" tools/environment.py)),.venv/bin)
PIP := $(BIN)/python -m pip install --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup train figure quick test test-all affected lab exercises chapters chapter slides lint grid benchmark gpu clean

help: ## Show this help
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# The stamp is newer than both lists, so unchanged requirements cost nothing.
setup: $(if $(filter .venv/bin,$(BIN)),.venv/stamp) ## Create .venv and install everything in it (other targets do this when needed)

.venv/stamp: requirements.txt pyproject.toml
	@echo "setup 1 of 3: an empty environment in .venv (seconds)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setup 2 of 3: PyTorch, JupyterLab and what they need. Minutes: it downloads about 0.5 GB,"
	@echo "              or several GB where pip chooses a torch with CUDA"
	@$(PIP) -r requirements.txt
	@echo "setup 3 of 3: minitron itself (seconds)"
	@$(PIP) --no-deps --editable .
	@touch .venv/stamp

train: setup ## Train the story model: about a minute on 2 cores
	$(BIN)/minitron data stories
	$(BIN)/minitron train configs/stories.toml

figure: setup ## (maintainers) Draw the README's figures; trains the story model for one of them
	rm -rf runs/figure
	$(BIN)/minitron data stories
	$(BIN)/minitron train configs/stories.toml --run-dir runs/figure
	cp runs/figure/loss_curve.png docs/story_loss.png
	$(BIN)/python tools/readme_figures.py

# For two cores; with more, make test WORKERS=8. The longest files come first (tests/conftest.py), so
# that all workers end together.
# Keep bytecode caching on: without it, every process that a test starts compiles all modules again.
export PYTHONDONTWRITEBYTECODE =
WORKERS := 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

quick: lint ## Check in 1.5 minutes: lint, import rules, each axis, each chapter's first exercise
	$(PYTEST) -m "not exhaustive" -k "(.1 and our_solution_passes) or not exercises" \
		tests/architecture tests/proof tests/exercises chapters/ch07_tensor_parallel.ipynb

test: lint ## Run what every change must pass: lint, tests and chapters, but no exhaustive ones
	$(PYTEST) -m "not exhaustive"

test-all: setup ## Run every test
	$(PYTEST)

affected: setup ## Run all tests, exhaustive ones too, that changes since a commit can affect: SINCE=REV
	@files=$$($(BIN)/python tools/affected.py $(if $(SINCE),--since $(SINCE))) || exit 2; \
	if [ -z "$$files" ]; then echo "affected: no test depends on what changed"; \
	else $(PYTEST) $$files; fi

# These settings keep JupyterLab from asking whether to show its news.
lab: setup ## Open the chapters in JupyterLab, as copies of your own in my_chapters/
	$(BIN)/python tools/my_chapters.py
	JUPYTER_CONFIG_PATH="$(CURDIR)/tools/jupyter$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}" \
		$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/my_chapters/ch01_single_gpu.ipynb

exercises: setup ## (maintainers) Write exercises/ from solutions/
	$(BIN)/python tools/build_exercises.py

# Executing notebooks needs nbclient, which installs jupyter-execute.
chapters: setup ## (maintainers) Build chapters/*.ipynb from chapters/source/*.py, executing what changed
	@test -x $(BIN)/jupyter-execute || $(PIP) --quiet --editable '.[maintain]'
	$(BIN)/python tools/build_chapters.py

chapter: setup ## (maintainers) Build a chapter, its exercises and its deck, and check them: make chapter CH=6
	@test -x $(BIN)/jupyter-execute || $(PIP) --quiet --editable '.[maintain]'
	@$(BIN)/python tools/chapter.py "$(CH)"

slides: setup ## (maintainers, instructors) Build slides/build/*.html and *.pdf; needs Node and Chromium
	$(BIN)/python tools/build_slides.py

lint: setup ## Check code style and formatting with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

grid: setup ## (maintainers) Compare every layout on up to 8 ranks with one process: hours
	$(BIN)/python tools/grid.py

benchmark: setup ## Compare with transformers and PyTorch's own parallelism, side by side
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/data_parallel.py
	$(BIN)/python benchmarks/all_reduce.py
	$(BIN)/python benchmarks/zero.py
	$(BIN)/python benchmarks/precision.py
	$(BIN)/python benchmarks/dryrun.py
	$(BIN)/python benchmarks/estimate.py

# Uses the environment if there is one, else python3, which must have torch with CUDA.
gpu: ## Measure this machine's GPU, in under 9 minutes; writes to benchmarks/results/gpu/
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py

clean: ## Remove .venv, data/, runs/, built slides, and your record of solved exercises (.minitron/)
	rm -rf .venv data runs .minitron slides/build slides/node_modules
