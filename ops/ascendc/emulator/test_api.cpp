// One test for each call that the emulator models, from what its documentation page says; and one for each misuse it
// reports. A program: prints what failed, exit status 1 if anything did.
#include "tests/arithmetic.h"
#include "tests/choosing.h"
#include "tests/memory.h"
#include "tests/order.h"

int main() {
  memory();
  queues();
  order();
  events();
  vector_mask();
  launches();
  global_memory();
  movement();
  arithmetic();
  by_repeats();
  choosing();
  sorting();
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures != 0;
}
