#!/usr/bin/env bash
# preview.sh DASHBOARD.json PROMETHEUS_URL OUT.png [MINUTES] - a dashboard drawn by Grafana's own components from real
# data. Needs node, npm and chromium; about 430 MB of node_modules in $WORK (default: dashboards/preview/build).
# ROWS=27 draws that many grid rows; HEIGHT is the picture's in pixels. First the JSON is checked against Grafana's types.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dashboard=$(realpath "$1") out=$(realpath -m "$3")
work=${WORK:-$here/build}
mkdir -p "$work"
cp "$here/main.jsx" "$work/"
if [ ! -d "$work/node_modules/@grafana/ui" ]; then
  (cd "$work" && npm init -y >/dev/null && npm install --no-audit --no-fund --legacy-peer-deps \
    @grafana/ui@13 @grafana/data@13 @grafana/schema@13 react@18 react-dom@18 rxjs esbuild typescript@5 typescript-json-schema >/dev/null)
fi
cd "$work"
if [ ! -f schema.json ]; then
  echo "import type { Dashboard } from '@grafana/schema'; export type Root = Dashboard;" > root.ts
  echo '{"compilerOptions": {"moduleResolution": "bundler", "module": "esnext", "skipLibCheck": true}, "files": ["root.ts"]}' > tsconfig.json
  npx typescript-json-schema tsconfig.json Root --noExtraProps -o schema.json
fi
"${PYTHON:-$here/../../.venv/bin/python}" "$here/check_schema.py" schema.json "$here"/../*.json
python3 "$here/collect.py" "$dashboard" "$2" data.js "${4:-15}"
npx esbuild main.jsx --bundle --outfile=out.js --define:process.env.NODE_ENV='"production"' --define:global=window \
  --loader:.svg=dataurl --loader:.woff2=dataurl --loader:.woff=dataurl --loader:.ttf=dataurl --loader:.png=dataurl \
  --legal-comments=none --log-level=error
cat > index.html <<'HTML'
<!doctype html><meta charset=utf-8><link rel=stylesheet href=out.css>
<body style="margin:0"><div id=root></div><script src=data.js></script><script src=out.js></script>
HTML
python3 -m http.server 9777 --bind 127.0.0.1 >/dev/null 2>&1 &
server=$!
trap 'kill $server' EXIT
sleep 1
chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars \
  --user-data-dir="$work/profile" --window-size="1216,${HEIGHT:-1000}" --virtual-time-budget=10000 \
  --screenshot="$out" "http://127.0.0.1:9777/index.html?rows=${ROWS:-}&theme=${THEME:-dark}" 2>/dev/null
ls -l "$out"
