// What the device compiler builds: all entry points.
#include "entries.h"
