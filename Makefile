# make demo              train a small GPT on the Python standard library's source, end to end
# make demo INPUT=x.jsonl  train on your own text instead (one {"text": ...} object per line)
# make demo MODEL=moe    train a mixture of experts instead, with the same work per token
# make demo MODEL=retro  train a Retro model and a GPT of the same size on texts that quote each other
# make demo MODEL=chat   finetune a small GPT on conversations and ask it 100 questions
# make demo MODEL=bert   train a BERT (or, with t5, a T5) that fills in masked words
#                        (a second run renames the first one's folder to runs/demo.1, and so on;
#                        OUT=runs/mine chooses another folder, OVERWRITE=1 replaces its files)
# make corpus WIKI=simple  download a Wikipedia and make a dataset of token ids from it
#                        (OUT=corpora/mine chooses a folder, URL= a mirror or a dump, TOKENIZER= a
#                        tokenizer.json; if it is interrupted, run the same command again)
# make serve             serve the model that make demo has trained, with a web page and an API
# make test              run the test suite
# make test-lowest       test the server with the oldest supported network libraries
# make test-sanitizers   run some of the kernel tests with AddressSanitizer and UBSan
# make lint              run ruff and mypy
# make docs              build the documentation site in build/site; any warning is an error
# Each command sets up .venv first and needs no root. PYTHON=python3.12 chooses the interpreter.

PYTHON ?=
VENV ?= .venv
MODEL ?= gpt
OUT ?= runs/demo$(if $(filter-out gpt,$(MODEL)),-$(MODEL))
INPUT ?=
OVERWRITE ?=
PORT ?= 5000
ITERS ?=
WIKI ?= simple
URL ?=
TOKENIZER ?=
TESTS ?= tests
# Three workers keep two cores busy, because tests also wait for timeouts and messages. A test that
# fails is run once more, and the summary lists it as RERUN: if it passes then, it depends on timing,
# which is a fault to be found, but not a reason to refuse a change.
PYTEST_FLAGS ?= -n 3 --dist worksteal --timeout 300 --reruns 1 -rfER

PY = $(VENV)/bin/python

.DEFAULT_GOAL = help
.PHONY: help setup demo corpus serve test test-lowest test-sanitizers lint docs clean

help:
	@sed -n '/^# /s/^# //p;/^$$/q' $(firstword $(MAKEFILE_LIST))

setup:
	@tools/setup_venv.sh "$(VENV)" "$(PYTHON)"

demo: setup
	@$(PY) tools/demo.py --model "$(MODEL)" --out "$(OUT)" $(if $(INPUT),--input "$(INPUT)") $(if $(ITERS),--iters $(ITERS)) $(if $(OVERWRITE),--overwrite)

corpus: OUT := $(if $(filter file,$(origin OUT)),corpora/$(WIKI)wiki,$(OUT))
corpus: setup
	@$(PY) tools/wikipedia/corpus.py --wiki "$(WIKI)" --out "$(OUT)" $(if $(URL),--url "$(URL)") $(if $(TOKENIZER),--tokenizer-model "$(TOKENIZER)")

serve: setup
	@PATH="$(abspath $(VENV))/bin:$$PATH" CHECKPOINT="$(OUT)/checkpoints" \
	    examples/run_text_generation_server_demo.sh --port $(PORT)

test: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_FLAGS) $(TESTS)

test-lowest: setup
	OMP_NUM_THREADS=1 $(PY) tools/test_lowest.py

test-sanitizers: setup
	$(PY) -m tests.kernels.sanitize --quick

lint: setup
	@failed=0; for check in "ruff check ." "ruff format --check ." mypy; do \
	    echo "$(PY) -m $$check"; $(PY) -m $$check || failed=1; \
	done; exit $$failed

docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo 'Open build/site/index.html. For the search, run: python3 -m http.server --directory build/site'

clean:
	rm -rf "$(VENV)" build .pytest_cache .mypy_cache .ruff_cache *.egg-info
