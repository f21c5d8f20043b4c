// Counts of one stream of requests, and how they are written as JSON. Times in nanoseconds, written in milliseconds.
#ifndef NPU_GR_BENCH_LOADGEN_STATS_H_
#define NPU_GR_BENCH_LOADGEN_STATS_H_

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BIN_NS 50000000LL  // requests are also counted by when they were due, in bins of 50 ms

enum { STEP_BITS = 5, STEPS = 1 << STEP_BITS, OCTAVES = 38 };  // 3 % a step, to 2^38 us

// Times by size: 32 steps an octave of microseconds, as HdrHistogram has them.
typedef struct {
  uint64_t counts[OCTAVES * STEPS];
  uint64_t total;
  int64_t most_ns;
} Histogram;

static int step_of(uint64_t us) {
  if (us < 2 * STEPS) return (int)us;
  int shift = 63 - __builtin_clzll(us) - STEP_BITS;
  return (shift + 1) * STEPS + (int)((us >> shift) - STEPS);
}

// The middle of a step, in microseconds.
static double middle_of(int step) {
  if (step < 2 * STEPS) return step + 0.5;
  int shift = step / STEPS - 1;
  return ((double)(step % STEPS + STEPS) + 0.5) * (double)(1ULL << shift);
}

static void record(Histogram *histogram, int64_t ns) {
  int step = step_of(ns > 0 ? (uint64_t)ns / 1000 : 0);
  histogram->counts[step < OCTAVES * STEPS ? step : OCTAVES * STEPS - 1]++;
  histogram->total++;
  if (ns > histogram->most_ns) histogram->most_ns = ns;
}

// The least time that so large a share of all is not above.
static double quantile_ms(const Histogram *histogram, double share) {
  double wanted = share * (double)histogram->total;
  uint64_t seen = 0;
  for (int step = 0; step < OCTAVES * STEPS; step++) {
    seen += histogram->counts[step];
    if (seen && (double)seen >= wanted) {
      double ms = middle_of(step) * 1e-3;
      double most_ms = (double)histogram->most_ns * 1e-6;
      return ms < most_ms ? ms : most_ms;
    }
  }
  return 0;
}

static void write_histogram(FILE *out, const char *name, const Histogram *histogram) {
  fprintf(out, "\"%s\":{\"count\":%llu,\"p50\":%.3f,\"p90\":%.3f,\"p99\":%.3f,\"max\":%.3f}", name,
          (unsigned long long)histogram->total, quantile_ms(histogram, 0.5), quantile_ms(histogram, 0.9),
          quantile_ms(histogram, 0.99), (double)histogram->most_ns * 1e-6);
}

// What became of a request: each is counted under exactly one of these.
typedef enum { IN_TIME, LATE, REFUSED, OTHER, TIMED_OUT, FAILED, NUM_FATES } Fate;
static const char *const FATES[NUM_FATES] = {"in_time", "late", "refused", "other", "timeouts", "errors"};

typedef struct {
  uint64_t due;  // requests that there should be
  uint64_t fates[NUM_FATES];
  uint64_t unsent;     // of the timeouts: no connection was free until the deadline
  Histogram answered;  // in time or late: from the instant the request was due
  Histogram refused;
  Histogram late_start;  // from due until the client took the request up
  uint64_t (*bins)[NUM_FATES];
  int num_bins;
} Stats;

static void make_bins(Stats *stats, int64_t span_ns) {
  stats->num_bins = (int)(span_ns / BIN_NS) + 2;
  stats->bins = calloc((size_t)stats->num_bins, sizeof *stats->bins);
  if (!stats->bins) abort();
}

// since_ns: when it was due, from the beginning of the stream. took_ns: from then until now.
static void count(Stats *stats, Fate fate, int64_t since_ns, int64_t took_ns) {
  stats->fates[fate]++;
  int64_t bin = since_ns / BIN_NS;
  if (bin >= stats->num_bins) bin = stats->num_bins - 1;
  stats->bins[bin][fate]++;
  if (fate == IN_TIME || fate == LATE) record(&stats->answered, took_ns);
  if (fate == REFUSED) record(&stats->refused, took_ns);
}

static void write_stats(FILE *out, const Stats *stats) {
  fprintf(out, "\"due\":%llu,\"unsent\":%llu", (unsigned long long)stats->due, (unsigned long long)stats->unsent);
  for (int fate = 0; fate < NUM_FATES; fate++)
    fprintf(out, ",\"%s\":%llu", FATES[fate], (unsigned long long)stats->fates[fate]);
  fputc(',', out);
  write_histogram(out, "answered_ms", &stats->answered);
  fputc(',', out);
  write_histogram(out, "refused_ms", &stats->refused);
  fputc(',', out);
  write_histogram(out, "late_start_ms", &stats->late_start);
  fputs(",\"bins\":[", out);
  for (int bin = 0; bin < stats->num_bins; bin++) {
    fputs(bin ? ",[" : "[", out);
    for (int fate = 0; fate < NUM_FATES; fate++)
      fprintf(out, fate ? ",%llu" : "%llu", (unsigned long long)stats->bins[bin][fate]);
    fputc(']', out);
  }
  fputc(']', out);
}

#endif  // NPU_GR_BENCH_LOADGEN_STATS_H_
