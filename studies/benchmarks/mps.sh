#!/bin/sh
# Lets several processes use one GPU at the same time, by NVIDIA's multi-process service; without it they take turns of
# milliseconds, in which processes of many short kernels wait most of the time. Source it before they are started:
#   . studies/benchmarks/mps.sh
# Where the service is missing or does not answer, everything runs as without it. It changes no setting of the card.
mps_begin() {
    command -v nvidia-cuda-mps-control >/dev/null || { echo "mps: not here"; return 0; }
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/weightclip-mps CUDA_MPS_LOG_DIRECTORY=/tmp/weightclip-mps-log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    [ -S "$CUDA_MPS_PIPE_DIRECTORY/control" ] || [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ] ||
        timeout 10 setsid nvidia-cuda-mps-control -d || true
    if timeout 30 python3 -c 'import torch; torch.ones(8, device="cuda").sum().item()' 2>/dev/null; then
        echo "mps: on"
    else
        echo "mps: does not answer, left out"
        echo quit | timeout 10 nvidia-cuda-mps-control 2>/dev/null || true
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
}
mps_begin
