#!/bin/sh
# Image rows on one GPU that other jobs share. Data and packages come in several calls, jobs run between them:
#   sh studies/benchmarks/images_gpu.sh bring FOLDER...     copies runs/gpu/site and folders of image sets to $WORK, and
#       runs/gpu/extractor: what an earlier machine kept (weights, perhaps of its snapshot, and results.tar.gz)
#   OUT=... sh studies/benchmarks/images_gpu.sh smoke       a minute: step times of extractor, ConvNet and WRN-16-4
#   sh studies/benchmarks/images_gpu.sh start JOB [option]  train | heads | figure | wrn, in the background
#       LIMIT=420: seconds of figure or wrn. MPS=1: jobs share the card by mps.sh. SETS="mnist": data sets of figure.
#       FIT=300: seconds that the steps of wrn would take alone. NETS=2: extractors that heads waits for and joins
#   OUT=... sh studies/benchmarks/images_gpu.sh look        last lines of all logs, and an archive of what is to be kept
#   OUT=... sh studies/benchmarks/images_gpu.sh wait 500    the same when the jobs have ended, after 500 seconds at the latest
# A machine that goes back when nothing is asked of it takes its jobs along: let the last call of a series be a `wait`.
# Newer typer needs pydantic, which is compiled: runs/gpu/site holds typer 0.15.4 and click 8.1.8 (pip --target) instead.
# Every job goes on where it stopped when it is started again. Afterwards, here: `weightclip-study extractor adopt` of
# what came back, and figure.jsonl of `figure` and `wrn` put together in results/figure, then `reproduce figure --draw`.
set -eu
WORK=${WORK:-$HOME/weightclip-images}
OUT=${OUT:-runs/gpu/kept}
mkdir -p "$WORK/data" "$OUT"
export PYTHONUNBUFFERED=1 PYTHONPATH="$WORK/tree/src:$WORK/tree/studies/src:$WORK/site" WEIGHTCLIP_DATA="$WORK/data"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} # several processes; with all cores each they wait for one another
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
study() { python3 -c 'from weightclip_studies.cli import main; main()' "$@"; }
there() { [ -e "$1" ]; } # whether the first of these files is there
busy() { for pid in "$WORK"/*.pid; do if [ -f "$pid" ] && kill -0 "$(cat "$pid")" 2>/dev/null; then return 0; fi; done; return 1; }
figure() { # folder, then options
    mkdir -p "$1"; [ -f "$1/noise.json" ] || cp "$WORK/tree/results/figure/noise.json" "$1/noise.json"
    rows=$WORK/tree/results/figure/figure.jsonl; case $1 in */figure | */wrn) # what a machine before made
        [ -f "$1/figure.jsonl" ] || [ ! -f "$rows" ] || cp "$rows" "$1/" ;; esac
    folder=$1; shift; study reproduce figure --out "$folder" "$@"
}
left() { echo $((UNTIL - $(date +%s))); } # seconds of a job
rows() { # data set, methods, options: cells of the ConvNet while there is time; what failed is tried once more
    [ "$(left)" -gt 5 ] || return 0
    dataset=$1 methods=$2; shift 2
    case " $* " in *" --ablation "*) number="--trials 1 --seeds 1" ;; *) number="--trials 5 --seeds 3" ;; esac
    set -- --datasets "$dataset" --methods "$methods" $number "$@"
    figure "$WORK/figure" "$@" --within "$(left)" || figure "$WORK/figure" "$@" --within "$(left)" || true
}
wide() { # folder, options: the Wide-ResNet; without the compiler if it fails with it
    folder=$WORK/$1; shift
    set -- --datasets cifar10 --epsilons 8 --methods joint "$@"
    figure "$folder" "$@" || TORCHDYNAMO_DISABLE=1 figure "$folder" "$@" || true
}
what=$1; shift
case $what in
bring)
    if [ ! -d "$WORK/tree" ]; then mkdir "$WORK/tree"; cp -r src studies results pyproject.toml "$WORK/tree/"; fi # of the first call
    for folder in site extractor; do if [ -d "runs/gpu/$folder" ]; then cp -r "runs/gpu/$folder" "$WORK/"; fi; done
    for folder in "$@"; do cp -r "$folder"/* "$WORK/data/"; done
    python3 studies/benchmarks/need.py torch numpy scipy sklearn safetensors PIL dp_accounting opacus typer rich
    ls "$WORK/data"; nvidia-smi --query-gpu=name,memory.used --format=csv,noheader ;;
smoke) # needs mnist and fashion_mnist; the Wide-ResNet needs cifar10
    (study extractor train --images 40960 --steps 150 --out "$WORK/smoke" --work "$WORK/smoke" 2>&1 | sed 's/^/extractor: /') &
    (figure "$WORK/smoke/convnet" --datasets mnist --epsilons 3 --methods joint,opacus --trials 2 --seeds 0 \
        2>&1 | sed 's/^/figure: /') &
    if [ -d "$WORK/data/cifar10" ]; then
        (wide smoke/wrn --trials 1 --seeds 1 --change steps=20 2>&1 | sed 's/^/wrn: /') &
    fi
    wait ;;
run)
    job=$1; shift
    echo $$ > "$WORK/$job.pid"
    trap 'rm -f "$WORK/$job.pid"' EXIT
    UNTIL=$(($(date +%s) + ${LIMIT:-420})) # of figure and wrn
    case $job in
    train) study extractor train --out "$WORK/extractor" --work "$WORK/extractor-work" "$@" ;;
    heads) # waits for so many extractors, whose json is written last; if training failed, takes its last snapshot
        until [ "$(ls "$WORK"/extractor/resnet9-*.json 2>/dev/null | wc -l)" -ge "${NETS:-1}" ]; do
            [ -f "$WORK/train.pid" ] || { cp "$WORK"/extractor-work/snapshot/* "$WORK/extractor/" || true; break; }
            sleep 1
        done
        mkdir -p "$WORK/heads"; [ -f "$WORK/heads/noise.json" ] || cp "$WORK/tree/results/images/noise.json" "$WORK/heads/"
        if ! there "$WORK"/heads/*.jsonl && [ -f "$WORK/extractor/results.tar.gz" ]; then
            tar xzf "$WORK/extractor/results.tar.gz" -C "$WORK/heads" # rows of an earlier machine
        fi
        for rows in "joined lip-weights" "joined dp-sgd,non-private" "learned lip-weights,non-private"; do
            study extractor heads --weights "$WORK/extractor" --out "$WORK/heads" --trials 14 \
                --features ${rows% *} --methods ${rows#* } "$@" || true
        done ;;
    figure) # three processes a set: the floor's rows, then the other methods, then ablations with one seed
        for dataset in ${SETS:-mnist fashion_mnist}; do
            (rows $dataset caps "$@"; rows $dataset factors "$@"; rows $dataset joint --ablation "$@") &
            (rows $dataset joint "$@"; rows $dataset plain,weights "$@"; rows $dataset weights --ablation "$@") &
            (rows $dataset opacus "$@"; rows $dataset opacus-adaptive,fix "$@") &
        done; wait ;;
    wrn) # one run of so many steps and views as fit into FIT seconds by the committed times of steps
        wide wrn --trials 1 --seeds 1 --fit "${FIT:-300}" --within "$(left)" --finish "$@" ;;
    esac ;;
start)
    job=$1
    if [ "${MPS:-0}" = 1 ]; then . studies/benchmarks/mps.sh; fi
    setsid nohup sh "$WORK/tree/studies/benchmarks/images_gpu.sh" run "$@" >>"$WORK/$job.log" 2>&1 </dev/null &
    sleep 1; echo "$job started" ;;
wait)
    until=$(($(date +%s) + ${1:-500}))
    while [ "$(date +%s)" -lt "$until" ] && busy; do sleep 1; done
    sh "$0" look ;;
look)
    for log in "$WORK"/*.log; do if [ -f "$log" ]; then echo "== $log"; tail -n 6 "$log"; fi; done
    if there "$WORK"/heads/*.jsonl; then (cd "$WORK/heads" && tar czf "$OUT/results.tar.gz" *); fi
    if there "$WORK"/extractor/resnet9-*.json; then cp "$WORK"/extractor/resnet9-* "$OUT/"
    elif there "$WORK"/extractor-work/snapshot/*.json; then cp -r "$WORK/extractor-work/snapshot" "$OUT/"; fi
    cp "$WORK"/wrn/runs/*/step-*/average.safetensors "$OUT/wrn-average.safetensors" 2>/dev/null || true  # so far
    found=$(cd "$WORK" && ls -d *.log figure/*.json* wrn/*.json* 2>/dev/null || true)
    if [ "$found" ]; then tar czf "$OUT/rows.tar.gz" -C "$WORK" $found; else echo "no rows yet"; fi ;;
esac
