#!/usr/bin/env bash
# Builds the NPU library on a machine with CANN and torch_npu, and puts it where npu_gr looks for it:
#   npu_gr/backend/npu/lib/libnpu_gr_ascend_<ascend910b|ascend910_93>.so
# A .json of the same name says for which torch, torch_npu, CANN and chip it was built.
# Usage: SOC_VERSION=ascend910b1 ops/ascendc/build.sh [--force] [FOLDER]
#   SOC_VERSION  as `npu-smi info` names the chip, in lower case with "ascend" before it
#   PYTHON       the Python that has torch and torch_npu (default: python3)
# A pair of CANN and torch_npu that npu_gr/backend/npu/versions.py lacks gets a warning; a CANN that is too old stops,
# unless --force is given.
# Exit status: 2 something is missing (the message says what), 3 this chip has no native ops, else that
# of the build.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}

stop() { echo "build.sh: $1" >&2; exit "${2:-2}"; }

force=
if [ "${1:-}" = --force ]; then force=--force; shift; fi
soc=${SOC_VERSION:-}
[ -n "$soc" ] || stop "SOC_VERSION is not set, e.g. SOC_VERSION=ascend910b1; npu-smi info names the chip"
soc=$(echo "$soc" | tr '[:upper:]' '[:lower:]')
case $soc in
  ascend910b*) variant=ascend910b ;;
  ascend910_93*) variant=ascend910_93 ;;
  ascend310p*) stop "310P has no Sort32, MrgSort or DataCopyPad: no native ops there, npu_gr runs the torch composition" 3 ;;
  *) stop "no native ops for $soc: 910B (ascend910b*) and A3 (ascend910_93*) have them" 3 ;;
esac
[ -n "${ASCEND_HOME_PATH:-}" ] || stop "ASCEND_HOME_PATH is not set: source CANN's set_env.sh first"
[ -d "$ASCEND_HOME_PATH" ] || stop "ASCEND_HOME_PATH is $ASCEND_HOME_PATH, which is no folder"
command -v cmake >/dev/null || stop "no cmake in PATH"
command -v "$python" >/dev/null || stop "no $python in PATH: set PYTHON"

# The folder of a package without importing it: importing torch_npu needs a device.
package() {
  "$python" -c 'import importlib.util, sys, os
spec = importlib.util.find_spec(sys.argv[1])
print(os.path.dirname(spec.origin) if spec else "")' "$1"
}
torch=$(package torch)
[ -n "$torch" ] || stop "$python has no torch: pip install 'npu_gr[npu]'"
torch_npu=$(package torch_npu)
[ -n "$torch_npu" ] || stop "$python has no torch_npu: pip install 'npu_gr[npu]'"
npu_version=$("$python" -c 'from importlib.metadata import version; print(version("torch-npu"))')
versions=$root/npu_gr/backend/npu/versions.py
cann=$("$python" "$versions" "$ASCEND_HOME_PATH" "$npu_version" $force 2> >(sed 's/^/build.sh: /' >&2)) || exit 2
read -r version abi < <(TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$python" -c \
  'import torch; print(torch.__version__, int(torch._C._GLIBCXX_USE_CXX11_ABI))')

out=${1:-$root/npu_gr/backend/npu/lib}
build=$root/build/npu-$variant
cmake -S "$here" -B "$build" -DSOC_VERSION="$soc" -DVARIANT="$variant" -DASCEND_HOME_PATH="$ASCEND_HOME_PATH" \
  -DTORCH_PATH="$torch" -DTORCH_NPU_PATH="$torch_npu" -DTORCH_CXX11_ABI="$abi" -DCANN="$cann" -DRUN_MODE=npu \
  -DCMAKE_BUILD_TYPE=Release
cmake --build "$build" -j
mkdir -p "$out"
cp "$build/libnpu_gr_ascend_$variant.so" "$out/"
printf '{"torch": "%s", "torch_npu": "%s", "cann": %s, "soc": "%s"}\n' "$version" "$npu_version" "$cann" "$soc" \
  > "$out/libnpu_gr_ascend_$variant.json"
echo "built $out/libnpu_gr_ascend_$variant.so for $soc, torch $version, CANN $cann"
