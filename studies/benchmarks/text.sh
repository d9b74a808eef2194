#!/bin/sh
# The text study on one GPU, in calls of about nine minutes. Before, here (writes encoder, tokens and noise multipliers):
#   weightclip-study text --prepare --plan --prepared runs/text/prepared --runs runs/text
# Then, on the machine, from the root of the checkout, as often as there is time:
#   OUT=folder-to-keep sh studies/benchmarks/text.sh
# KEPT is what an earlier call (or another machine) left in its OUT, or runs/text: trials.jsonl and noise.json in it are
# taken over, and nothing in them is run again. Further words are options of `weightclip-study text`.
set -eu
OUT=${OUT:-runs/text/kept}
PREPARED=${PREPARED:-runs/text/prepared}
KEPT=${KEPT:-runs/text}
mkdir -p "$OUT"
for file in trials.jsonl noise.json sst2.csv recipes.csv canaries.csv; do
    if [ -f "$KEPT/$file" ] && [ ! -f "$OUT/$file" ]; then cp "$KEPT/$file" "$OUT/$file"; fi
done
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src:$PWD/studies/src${PYTHONPATH:+:$PYTHONPATH}"
python3 studies/benchmarks/need.py torch numpy scipy sklearn safetensors dp_accounting opacus matplotlib typer rich
exec python3 -c 'from weightclip_studies.cli import main; main()' text --plan --prepared "$PREPARED" --runs "$OUT" \
    --out "$OUT/sst2.csv" --within "${WITHIN:-500}" --jobs "${JOBS:-3}" "$@"
