#!/bin/bash
# Compile the functions in C for other systems, whose headers ziglang brings along: bash lab/tools/elsewhere.sh PYTHON
#
# PYTHON has pip; ziglang gets a folder in build.
set -euo pipefail
python=$1
[ -d build/zig ] || "$python" -m pip install -q --target build/zig ziglang
failed=0
for target in "aarch64-macos -mcpu=apple_m1" "x86_64-macos -mcpu=haswell" "x86_64-windows-gnu -mcpu=haswell" \
    aarch64-windows-gnu "aarch64-linux-gnu -mcpu=neoverse_v1" "x86_64-linux-gnu -mcpu=sapphirerapids"; do
    for source in pool.c draw.c move.c layers.c "layers.c -DREAL16"; do
        # shellcheck disable=SC2086 # words are options
        if PYTHONPATH=build/zig "$python" -m ziglang cc --target=$target -std=gnu11 -O1 -c -o build/elsewhere.o \
            src/outpace/native/$source; then
            echo "$target $source: compiled"
        else
            failed=1
        fi
    done
done
exit $failed
