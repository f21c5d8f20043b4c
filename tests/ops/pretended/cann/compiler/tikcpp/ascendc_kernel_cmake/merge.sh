#!/usr/bin/env bash
# Merges objects; as CANN's script does, it takes options in pairs and fails where one has no value.
set -e
while [ $# -gt 0 ]; do
  case $1 in
    -o) out=$2; shift 2 ;;
    --objects) objects=$2; shift 2 ;;
    --build-type) type=$2; shift 2 ;;
    *) echo "merge.sh: $1?" >&2; exit 2 ;;
  esac
done
case $type in Release | Debug) ;; *) echo "merge.sh: build type $type?" >&2; exit 2 ;; esac
# shellcheck disable=SC2086
ld -r -o "$out" ${objects//;/ }
