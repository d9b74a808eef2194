#!/bin/sh
# The text study on one GPU that is there for some minutes. Before, here (encoder, tokens, packages, noise multipliers; the
# last line is for SMOKE):
#   weightclip-study text --prepare --plan --epochs 8 --prepared KEPT/prepared --runs KEPT --site runs/gpu
#   weightclip-study text --prepare --plan --epochs 2 --records 8192 --prepared KEPT/prepared --runs KEPT/smoke
# Then, on the machine, from the root of the checkout, as often as there is time:
#   SMOKE=1 sh studies/benchmarks/text.sh                      half a minute: the whole plan in a tiny form; keeps nothing
#   sh studies/benchmarks/text.sh --timing                     times of all methods, with nothing else on the GPU
#   sh studies/benchmarks/text.sh                              rows, recipes, an audit: the most important first
# All that has to come back is OUT/text-trials.jsonl: put it in the place of KEPT/trials.jsonl, and nothing in it is run
# again. Tables are made from it by --within 0. Further words are options of `weightclip-study text`.
set -eu
KEPT=${KEPT:-runs/gpu/text}
SITE=${SITE:-runs/gpu/site}
OUT=${OUT:-$KEPT/kept}
WORK=${WORK:-$(mktemp -d)}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src:$PWD/studies/src:$PWD/$SITE${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
if [ "${SMOKE:-}" ]; then
    python3 studies/benchmarks/need.py torch numpy scipy sklearn safetensors dp_accounting opacus typer rich
    KEPT=$KEPT/smoke
    set -- --records 8192 --epochs 2 --seeds 1 "$@"
else
    touch "$OUT/text-trials.jsonl"
    if [ -f "$KEPT/trials.jsonl" ] && [ ! -s "$OUT/text-trials.jsonl" ]; then cp "$KEPT/trials.jsonl" "$OUT/text-trials.jsonl"; fi
    ln -sf "$(cd "$OUT" && pwd)/text-trials.jsonl" "$WORK/trials.jsonl"
fi
cp "$KEPT/noise.json" "$WORK/noise.json"
exec python3 studies/benchmarks/plain.py text --plan --prepared "${KEPT%/smoke}/prepared" \
    --runs "$WORK" --out "$WORK/sst2.csv" --within "${WITHIN:-300}" --jobs "${JOBS:-1}" "$@"
