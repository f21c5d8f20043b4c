// Draws a dashboard's JSON with Grafana's own React components, without a Grafana server: time series, stat, bar gauge
// and table. What belongs to the Grafana app (variables, field-config registry, panel plug-ins) is merged here by hand.
import React from 'react';
import { createRoot } from 'react-dom/client';
import { FieldType, ThresholdsMode, createTheme, getDisplayProcessor, getFieldDisplayValues, toDataFrame, ThemeContext } from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, LegendDisplayMode, PanelChrome, Table, TimeSeries } from '@grafana/ui';

const asked = new URLSearchParams(location.search);
const theme = createTheme({ colors: { mode: asked.get('theme') ?? 'dark' } });
const COLUMN = 50, ROW = 36, TOP = 40;
const last = Number(asked.get('rows') || Infinity); // grid rows to draw

function configOf(panel) {
  const defaults = structuredClone(panel.fieldConfig.defaults);
  const steps = defaults.thresholds?.steps ?? [{ value: null, color: 'green' }];
  defaults.thresholds = { mode: ThresholdsMode.Absolute, steps: steps.map((s) => ({ ...s, value: s.value ?? -Infinity })) };
  defaults.color ??= { mode: panel.type === 'timeseries' ? 'palette-classic' : 'thresholds' };
  return { defaults, overrides: [] };
}

function framesOf(series, config) {
  return series.map((s) => {
    const frame = toDataFrame({
      refId: s.refId,
      fields: [
        { name: 'time', type: FieldType.time, values: s.values.map((v) => v[0] * 1000) },
        { name: 'Value', type: FieldType.number, labels: s.labels, values: s.values.map((v) => (Number.isFinite(Number(v[1])) ? Number(v[1]) : null)) },
      ],
    });
    const field = frame.fields[1];
    field.config = { ...structuredClone(config.defaults), displayNameFromDS: s.name };
    field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
    return frame;
  });
}

// The component wants one frame: values on the union of all timestamps, and what is stacked already summed up.
function joined(frames) {
  const times = [...new Set(frames.flatMap((f) => f.fields[0].values))].sort((a, b) => a - b);
  const fields = frames.map((f, index) => {
    const at = new Map(f.fields[0].values.map((t, i) => [t, f.fields[1].values[i]]));
    return { ...f.fields[1], values: times.map((t) => at.get(t) ?? null), state: { seriesIndex: index } };
  });
  return { length: times.length, fields: [{ ...frames[0].fields[0], values: times }, ...fields] };
}

function Body({ panel, series, range, width, height }) {
  const fieldConfig = configOf(panel);
  const frames = framesOf(series, fieldConfig);
  if (!frames.length) {
    return <div style={{ textAlign: 'center', paddingTop: height / 2 - 10, color: theme.colors.text.secondary }}>No data</div>;
  }
  if (panel.type === 'timeseries') {
    const instant = (s) => ({ valueOf: () => s * 1000 });
    return (
      <TimeSeries frames={[joined(frames)]} structureRev={1} width={width} height={height} timeZone="utc"
        timeRange={{ from: instant(range[0]), to: instant(range[1]), raw: {} }}
        legend={{ displayMode: LegendDisplayMode.List, placement: 'bottom', calcs: [], showLegend: true }} />
    );
  }
  if (panel.type === 'table') {
    const hidden = panel.transformations[0].options.excludeByName;
    const names = [...new Set(series.flatMap((s) => Object.keys(s.labels)))].filter((n) => !hidden[n]);
    const frame = toDataFrame({ fields: names.map((name) => ({ name, type: FieldType.string, values: series.map((s) => s.labels[name] ?? '') })) });
    frame.fields.forEach((field) => { field.display = getDisplayProcessor({ field, theme }); });
    return <Table data={frame} width={width} height={height} />;
  }
  const values = getFieldDisplayValues({ data: frames, fieldConfig, reduceOptions: panel.options.reduceOptions, replaceVariables: (s) => s, theme, timeZone: 'utc', sparkline: true });
  if (panel.type === 'bargauge') {
    const each = Math.min(34, height / values.length);
    return <div>{values.map((v, i) => (
      <BarGauge key={i} width={width} height={each} theme={theme} field={v.field} value={v.display} orientation="horizontal" displayMode="gradient" showUnfilled />
    ))}</div>;
  }
  return <div style={{ display: 'flex' }}>{values.map((v, i) => (
    <BigValue key={i} width={width / values.length} height={height} theme={theme} value={{ ...v.display, title: undefined }}
      colorMode="value" graphMode="area" sparkline={v.sparkline} />
  ))}</div>;
}

const { board, panels, range } = window.__PREVIEW__;
const fits = board.panels.filter((p) => p.gridPos.y + p.gridPos.h <= last);
const shown = fits.filter((p, i) => p.type !== 'row' || i + 1 < fits.length); // no title without its panels
const height = TOP + Math.max(...shown.map((p) => (p.gridPos.y + p.gridPos.h) * ROW)) + 8;
createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <div style={{ position: 'relative', width: 24 * COLUMN + 16, height, background: theme.colors.background.canvas, color: theme.colors.text.primary, fontFamily: theme.typography.fontFamily }}>
      <div style={{ padding: '10px 12px', fontSize: 17, fontWeight: 500 }}>{board.title}</div>
      {shown.map((p) => {
        const at = { position: 'absolute', left: 8 + p.gridPos.x * COLUMN, top: TOP + p.gridPos.y * ROW };
        if (p.type === 'row') { return <div key={p.id} style={{ ...at, fontWeight: 500, paddingTop: 8 }}>▾ {p.title}</div>; }
        return (
          <div key={p.id} style={at}>
            <PanelChrome width={p.gridPos.w * COLUMN - 8} height={p.gridPos.h * ROW - 8} title={p.title} description={p.description}>
              {(width, inner) => <Body panel={p} series={panels[p.id] ?? []} range={range} width={width} height={inner} />}
            </PanelChrome>
          </div>
        );
      })}
    </div>
  </ThemeContext.Provider>
);
document.title = `${height}`;
