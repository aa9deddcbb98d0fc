#!/bin/bash
# Instructions that a row's product takes on emulated ARM, a hint of its cost: bash lab/tools/arm_instructions.sh FOLDER
#
# Of 1,024 inputs and 256 outputs, with the rounding of the row. Needs gcc-aarch64-linux-gnu and qemu-user.
set -euo pipefail
at=$(realpath -m "$1") here=$(dirname "$0")/instructions
mkdir -p "$at"
gcc -shared -fPIC -O1 -o "$at/plugin.so" "$here/plugin.c"
counted() { qemu-aarch64 -cpu max -plugin "$at/plugin.so" "$@" 2>&1 | tail -1; }
for march in armv8-a armv8.2-a+dotprod armv8.2-a+dotprod+bf16 armv8.2-a+dotprod+bf16+i8mm; do
    made="$at/product-$march"
    aarch64-linux-gnu-gcc -static -march=$march -std=gnu11 -O3 -fno-math-errno -DREAL16 -Isrc/outpace/native -o "$made" \
        "$here/product.c" -lm -lpthread
    for bits in 0 8 4 108 112; do
        for rows in 1 2 4 12; do
            few=$(counted "$made" $bits $rows 1) many=$(counted "$made" $bits $rows 3)
            echo "$march bits $bits rows $rows: $(((many - few) / 2 / rows))"
        done
    done
done
