// Random jobs for every kernel of one instruction set, on buffers that end where the data ends: built by
// test_sanitizers.py with the real sources of ops/cpu, with sanitizers here and by the cross compiler for aarch64.
#include "dense.h"
#include "hstu.h"
#include "hstu_pass.h"
#include "items.h"
#include "order.h"
#include "selection.h"

namespace {

void one_round(int kind) {
  switch (kind) {
    case 0: return select<float>();
    case 1: return select<bf16>();
    case 2: return hstu::one<float, float>();
    case 3: return hstu::one<bf16, bf16>();
    case 4: return hstu::one<float, bf16>();
    case 5: return hstu::one<bf16, float>();
    case 6: return Beams<float>().run();
    case 7: return Beams<bf16>().run();
    case 8: return affine<float, float, float>();
    case 9: return affine<bf16, bf16, bf16>();
    case 10: return affine<float, bf16, bf16>();
    case 11: return affine<bf16, float, float>();
    case 12: return best_items();
    case 13: return hstu::Ranker<float>().run();
    case 14: return blend_sums();
    case 15: return item_products();
    case 16: return hstu::one<float, int8_t>();
    case 17: return hstu::one<bf16, int8_t>();
    default: return hstu::Ranker<bf16>().run();
  }
}

}  // namespace

int main(int, char **argv) {
  const int rounds = atoi(argv[1]);
  for (int i = 0; i < rounds; ++i) {
    random_bits.seed(static_cast<unsigned>(i));
    one_round(i % 19);
  }
  printf("%s: %d rounds\n", kernels.isa, rounds);
}
