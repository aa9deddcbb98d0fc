#!/bin/bash
# Tests on an emulated 64-bit ARM processor, once for each set of instructions: bash lab/tools/arm.sh FOLDER PYTHON [TESTS]
#
# FOLDER gets a Python for ARM, of Debian's packages, and wheels of torch for ARM. PYTHON is one of version 3.11 with pip.
# Needs Debian 12, and as root: apt-get install qemu-user gcc-aarch64-linux-gnu
set -euo pipefail
at=$(realpath -m "$1"); python=$2; shift 2

packages=(python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgomp1 libgcc-s1 zlib1g
    libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libncursesw6 libtinfo6 libreadline8 libdb5.3
    libnsl2 libtirpc3 libcrypt1 libgfortran5 libgssapi-krb5-2 libkrb5-3 libk5crypto3 libkrb5support0 libcom-err2
    libkeyutils1)
# torch 2.6 is the last whose wheel for ARM has no CUDA in it.
wheels=(torch==2.6.0 'numpy<2.4' transformers==5.24.0 safetensors rich typer pydantic pydantic-core annotated-types
    typing-inspection jinja2 markupsafe typing_extensions filelock fsspec networkx sympy==1.13.1 mpmath tokenizers
    huggingface-hub pyyaml regex tqdm packaging click shellingham markdown-it-py mdurl pygments httpx2 httpcore2 truststore
    anyio h11 idna certifi requests urllib3 charset-normalizer psutil gguf hypothesis sortedcontainers attrs pytest
    pluggy iniconfig pytest-xdist execnet annotated-doc tomlkit accelerate)

if [ "$(cat "$at/made" 2>/dev/null)" != "${packages[*]} ${wheels[*]}" ]; then
    mkdir -p "$at/packages" "$at/root" "$at/lists/partial" # lists of its own: this system's stay without ARM
    apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State::lists="$at/lists"
        -o Dir::State::status=/dev/null -o Dir::Cache="$at/packages" -o APT::Sandbox::User=root)
    "${apt[@]}" update
    (cd "$at/packages" && "${apt[@]}" download "${packages[@]}")
    for package in "$at"/packages/*.deb; do dpkg -x "$package" "$at/root"; done
    "$python" -m pip install -q --upgrade --no-deps --target "$at/site" --python-version 3.11 --only-binary=:all: \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        --platform any "${wheels[@]}"
    echo "${packages[*]} ${wheels[*]}" >"$at/made"
fi

# What processes that Python starts are called by too.
printf '#!/bin/sh\nexec qemu-aarch64 -L %q -0 "$0" %q "$@"\n' "$at/root" "$at/root/usr/bin/python3.11" >"$at/root/usr/bin/python"
chmod +x "$at/root/usr/bin/python"

# Set of instructions -> a processor that has no better one. Only "max" has bfloat16; its long vectors and signed pointers, which
# no set uses, are slow to emulate.
declare -A processors=([armv8]=cortex-a53 [armv8-dot]=neoverse-n1 [armv8-bf16]=max,sve=off,pauth=off [armv8-i8mm]=max,sve=off,pauth=off)
emulated() { # the compiler runs as it is, beneath the emulator
    local set=$1
    shift
    QEMU_CPU=${processors[$set]} PYTHONPATH="$at/site:${source:-$PWD/src}" HF_HUB_OFFLINE=1 OUTPACE_CACHE="$at/cache" \
        CC="${compiler:-aarch64-linux-gnu-gcc}" OMP_NUM_THREADS=1 OUTPACE_CPU="$set" "$at/root/usr/bin/python" "$@"
}
# Each set runs the functions, the demo and the wheel. Steps and drafts run on the least set and the best one: those
# between have the floats of the one or the other, and the integers' dot products.
functions=(tests/unit/native/test_layers.py tests/unit/native/test_draw.py tests/unit/native/test_shared.py
    tests/unit/native/test_instructions.py tests/unit/native/test_systems.py tests/unit/targets/test_quants.py)
steps=(tests/unit/targets/test_native.py tests/lossless/test_gguf.py tests/lossless/test_bit_exact.py
    tests/lossless/test_matrix.py::test_float32_tokens_differ_at_near_ties_only)
given=("$@")
compiled="import torch; from outpace.native.layers import *; assert all(isinstance(functions(d), CDLL) for d in DTYPES)"

# The wheel for ARM, compiled by zig for every set.
rm -rf "$at/wheel" && mkdir -p "$at/wheel"
[ -d "$at/zig" ] || "$python" -m pip install -q --target "$at/zig" ziglang
OUTPACE_LIBRARIES=manylinux_2_28_aarch64 CC="$at/zig/ziglang/zig cc" \
    "$python" -m pip wheel -q --no-deps --wheel-dir "$at/wheel" .
"$python" -m zipfile -e "$at"/wheel/*.whl "$at/wheel/unpacked"

checked() { # one set: the source, then the wheel where nothing can be compiled
    local failed=0 tests=("${functions[@]}")
    [[ $1 == armv8 || $1 == armv8-i8mm ]] && tests+=("${steps[@]}")
    [ ${#given[@]} -eq 0 ] || tests=("${given[@]}")
    echo "== $1 (${processors[$1]})"
    emulated "$1" -c "$compiled" || failed=1 # else tests would be skipped
    emulated "$1" -m pytest -q -n 0 -p no:cacheprovider -m "not slow and not real" --durations 10 \
        -k "not early_exit" "${tests[@]}" || failed=1 # early_exit is outpace-lab's, which is not installed there
    emulated "$1" -m outpace demo || failed=1
    echo "== the wheel, $1"
    source="$at/wheel/unpacked" compiler=none
    emulated "$1" -c "$compiled" || failed=1
    emulated "$1" -m outpace demo || failed=1
    emulated "$1" -m pytest -q -n 0 -p no:cacheprovider -k "q4_k_m and suffix" tests/lossless/test_gguf.py || failed=1
    return $failed
}
failed=0
sets=(${SETS:-armv8 armv8-i8mm armv8-dot armv8-bf16}) # the long ones first
for set in "${sets[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n || failed=1; done # two at once
    checked "$set" >"$at/$set.log" 2>&1 &
done
while [ "$(jobs -p | wc -l)" -gt 0 ]; do wait -n || failed=1; done
for set in "${sets[@]}"; do cat "$at/$set.log"; done
bash lab/tools/arm_instructions.sh "$at/instructions"
exit $failed
