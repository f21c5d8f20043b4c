#!/usr/bin/env bash
# Builds the Ascend operators into an image; deploy/Dockerfile runs it. A BASE with CANN needs SOC_VERSION, so that no
# image for an NPU is without operators by accident. A BASE without CANN gets none.
# Usage: SOC_VERSION=ascend910b1 deploy/operators.sh PYTHON [FOLDER]
#   SOC_VERSION  as `npu-smi info` names the chip, in lower case with "ascend" before it; "none" = no operators
#   PYTHON       of the environment that has npu_gr, torch and torch_npu
#   FOLDER       for the library; default: where npu_gr looks for it
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$1 soc=${SOC_VERSION:-}

stop() { echo "operators.sh: $1" >&2; exit 2; }

for home in /usr/local/Ascend/cann /usr/local/Ascend/ascend-toolkit; do
  if [ -z "${ASCEND_HOME_PATH:-}" ] && [ -f "$home/set_env.sh" ]; then
    set +u
    # shellcheck disable=SC1091
    . "$home/set_env.sh"
    set -u
  fi
done
[ "$soc" != none ] || exit 0
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
  [ -z "$soc" ] || stop "SOC_VERSION is $soc, and BASE has no CANN: take one with the toolkit and torch_npu"
  exit 0
fi
[ -n "$soc" ] || stop "BASE has CANN: give --build-arg SOC_VERSION=ascend910b1, the chip of npu-smi info, or none"
folder=${2:-$("$python" -c 'from npu_gr.backend.npu.ops import LIBRARIES; print(LIBRARIES)')}
PYTHON=$python bash "$root/ops/ascendc/build.sh" "$folder"
ls "$folder"/libnpu_gr_ascend_*.so
