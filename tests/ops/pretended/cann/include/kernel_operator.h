// The device compiler's header: the CPU twin of ops/ascendc. When sources are preprocessed for their entry points it is
// empty, so that the marks of an entry point stand in the text.
#pragma once
#ifndef PRETENDED_PREPROCESS
#define ASCENDC_CPU_TWIN 1
#include "ascendc_twin.h"
#endif
