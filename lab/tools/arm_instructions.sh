#!/bin/bash
# Instructions that a row takes on emulated ARM, a hint of its cost: bash lab/tools/arm_instructions.sh FOLDER
#
# Of a product of 1,024 inputs and 256 outputs, with the rounding of the row; a norm of 1,024 numbers; attention of 8 heads,
# of 64 numbers and with 2 of keys, to 512 columns; a draw from 32,000 tokens. Needs gcc-aarch64-linux-gnu and qemu-user.
set -euo pipefail
at=$(realpath -m "$1") here=$(dirname "$0")/instructions
mkdir -p "$at"
gcc -shared -fPIC -O1 -o "$at/plugin.so" "$here/plugin.c"
counted() { qemu-aarch64 -cpu max -plugin "$at/plugin.so" "$@" 2>&1 | tail -1; }
made() { # one program: its name, and the compiler's options
    aarch64-linux-gnu-gcc -static "${@:2}" -std=gnu11 -O3 -fno-math-errno -Isrc/outpace/native -o "$1" "$here/counted.c" \
        -lm -lpthread
}
for march in armv8-a armv8.2-a+dotprod armv8.2-a+dotprod+bf16 armv8.2-a+dotprod+bf16+i8mm; do
    made "$at/parts" -march=$march -DREAL16
    made "$at/draws" -march=$march -DDRAWS
    for part in 0 8 4 108 112 norm attention draw; do
        for rows in 1 2 4 12; do
            of=$([ $part = draw ] && echo draws || echo parts)
            few=$(counted "$at/$of" $part $rows 1) many=$(counted "$at/$of" $part $rows 3)
            echo "$march part $part rows $rows: $(((many - few) / 2 / rows))"
        done
    done
done
