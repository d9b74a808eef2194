#!/bin/sh
# The speed rows on one GPU, the most important first, in calls of about nine minutes. From the root of the checkout:
#   OUT=folder-to-keep sh studies/benchmarks/speed.sh            # all that has not been measured yet
#   OUT=folder-to-keep sh studies/benchmarks/speed.sh encoder    # only lines with that word
# Rows go to $OUT/step.csv, next to those that are there (KEPT: a file from an earlier call); $OUT/done.txt holds the lines
# that have ended and are not run again. A line that fails or takes too long is told of and stops no other.
# At home again: copy $OUT/step.csv over results/bench/step.csv; rows of a CPU in it stay. Steps over Poisson draws, whose
# rows have the same columns, go to $OUT/draws.csv. Compiling takes most of a line's time (six modes of the encoder: more
# than 100 s); rows of a model and batch are written when all of its modes are measured, and modes that would begin after six tenths of a
# line's seconds are left out.
set -u
OUT=${OUT:-runs/speed}
WITHIN=${WITHIN:-540}
ONLY=${1:-}
mkdir -p "$OUT"
if [ -f "${KEPT:-results/bench/step.csv}" ] && [ ! -f "$OUT/step.csv" ]; then cp "${KEPT:-results/bench/step.csv}" "$OUT/step.csv"; fi
touch "$OUT/done.txt"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src:$PWD/studies/src:$PWD/${SITE:-runs/gpu/site}${PYTHONPATH:+:$PYTHONPATH}"
python3 studies/benchmarks/need.py torch numpy scipy sklearn safetensors dp_accounting opacus || exit 1
began=$(date +%s)

# seconds a line may take at most, then what it measures
while read -r seconds line; do
    case "$line" in *"$ONLY"*) ;; *) continue ;; esac
    if grep -qxF -- "$line" "$OUT/done.txt"; then continue; fi
    left=$((WITHIN - $(date +%s) + began))
    if [ "$left" -lt "$seconds" ]; then echo "left for another call: $line"; continue; fi
    echo "== $line"
    case "$line" in *--draws*) file=draws.csv ;; *) file=step.csv ;; esac
    # shellcheck disable=SC2086 -- the words of the line are options
    if timeout "$seconds" python3 studies/benchmarks/step.py --append --out "$OUT/$file" --seconds "${EACH:-0.5}" \
        --within $((seconds * 6 / 10)) $line; then
        printf '%s\n' "$line" >> "$OUT/done.txt"
    else
        echo "failed or too long: $line"
    fi
done <<'LINES'
60 --models wrn-16-4 --batches 1024 --precision tf32 --modes plain weights factors exact-joint-cap
60 --models mlp-4096 --batches 1024 --modes plain factors joint-cap exact-joint-cap weights weights-refresh
180 --models encoder-base --batches 64 --precision bf16 --compile --modes plain-graph factors-graph exact-joint-cap-graph
120 --models resnet18 --batches 256 --precision bf16 --compile --channels-last --modes plain factors exact-joint-cap opacus-hooks opacus-ghost
150 --models wrn-16-4 --batches 1024 --precision bf16 --compile --channels-last --draws --modes plain factors exact-joint-cap
150 --models wrn-16-4 --batches 1024 --precision bf16 --compile --channels-last --modes plain weights factors exact-cap exact-joint-cap
150 --models resnet50 --batches 128 --precision bf16 --compile --channels-last --modes plain factors exact-joint-cap opacus-hooks opacus-ghost
60 --models convnet --batches 4096 --precision tf32 --modes plain weights factors exact-joint-cap
60 --models mlp --batches 512 --modes plain weights factors both joint-cap plain-graph weights-graph factors-graph both-graph joint-cap-graph
60 --models wrn-16-4 --batches 256 1024 --modes plain-graph weights-graph factors-graph
150 --models encoder-base --batches 64 --precision bf16 --compile --modes plain factors exact-joint-cap
120 --models wrn-16-4 --batches 1024 --precision bf16 --compile --channels-last --modes plain-graph weights-graph factors-graph exact-joint-cap-graph
40 --models encoder-base --batches 64 --precision bf16 --modes plain opacus-hooks opacus-ghost
40 --models wrn-16-4 --batches 1024 --precision bf16 --channels-last --modes plain opacus-hooks opacus-ghost
90 --models wrn-16-4 --batches 1024 --precision tf32 --modes plain opacus-hooks opacus-ghost
60 --models mlp-4096 --batches 1024 --modes plain opacus-ghost
60 --models convnet --batches 64 256 1024 4096 8192 --modes plain opacus-hooks opacus-ghost
90 --models wrn-16-4 --batches 256 1024 2048 --modes plain opacus-hooks opacus-ghost
60 --models mlp --batches 512 --modes plain opacus-hooks opacus-ghost
60 --models convnet --batches 4096 --precision tf32 --modes plain opacus-hooks opacus-ghost
120 --models convnet --batches 64 256 1024 4096 8192 --modes plain weights factors both joint-cap exact-joint-cap
150 --models wrn-16-4 --batches 256 1024 2048 --modes plain weights factors both joint-cap exact-joint-cap
90 --models convnet --batches 64 256 1024 4096 --modes plain-graph weights-graph factors-graph both-graph joint-cap-graph exact-joint-cap-graph
LINES
