// CPU emulator of the part of Ascend C that the kernels here use, so that g++ builds them unchanged.
//
// Own work, from the public API pages named in each file. It checks what the pages demand (alignment, limits, UB
// size, queues, flags, order between and within pipes, GM between cores) and poisons what they leave undefined.
// Limits: no timing and no bank conflicts; Exp and Ln are libm's; SyncAll and cross-core flags are not modelled, as no
// kernel uses them; the order of -0.0 and +0.0 in a sort, and everything beyond the pages, is a guess.
#pragma once
#include "cast.h"
#include "launch.h"
#include "move.h"
#include "repeat.h"
#include "sort.h"
#include "vector.h"
