#!/bin/sh
# Learned features and private heads on one GPU, in calls of about nine minutes. Before, here: weightclip-study extractor pack
# Then, on the machine, from the root of the checkout, once for each piece of data and again until it says "nothing left":
#   OUT=folder-to-keep sh studies/benchmarks/extractor.sh
# WORK stays on the machine (data, checkpoints, rows); EARLIER is what another machine kept. Further words are options of
# `weightclip-study extractor plan`.
set -eu
WORK=${WORK:-$HOME/weightclip-extractor}
OUT=${OUT:-runs/extractor/kept}
PIECES=${PIECES:-runs/pieces}
mkdir -p "$WORK"
if [ -d "$PIECES/site" ]; then rm -rf "$WORK/site" && cp -r "$PIECES/site" "$WORK/site"; fi
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src:$PWD/studies/src:$WORK/site"
python3 studies/benchmarks/need.py torch numpy scipy sklearn safetensors PIL dp_accounting typer rich
exec python3 -c 'from weightclip_studies.cli import main; main()' extractor plan \
    --work "$WORK" --out "$OUT" --pieces "$PIECES" ${EARLIER:+--earlier "$EARLIER"} --within "${WITHIN:-520}" "$@"
