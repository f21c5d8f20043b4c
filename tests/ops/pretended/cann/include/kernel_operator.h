// The device compiler's header: the CPU emulator of ops/ascendc. When sources are preprocessed for their entry points
// it is empty, so that the marks of an entry point stand in the text.
#pragma once
#ifndef PRETENDED_PREPROCESS
#define ASCENDC_CPU_EMULATOR 1
#include "ascendc_emulator.h"
#endif
