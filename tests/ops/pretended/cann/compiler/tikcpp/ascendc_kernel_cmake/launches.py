"""`launches.py PREPROCESSED SOURCE STUB HEADERS`: write launch functions and their headers.

Read from the preprocessed text, as CANN's own script reads them: name, arguments, and the kind of
kernel.
"""

import re
import sys
from pathlib import Path

ENTRY = re.compile(r'extern "C" __global__ __aicore__ void (\w+)\(([^)]*)\)')
KIND = re.compile(r"KERNEL_TASK_TYPE_DEFAULT\((\w+)\)")
HEADER = """#pragma once
#include "acl/acl_base.h"
#include <cstdint>
extern "C" uint32_t aclrtlaunch_{name}(uint32_t blockDim, aclrtStream stream{declared});
"""
STUB = """
extern "C" uint32_t aclrtlaunch_{name}(uint32_t blockDim, void *stream{declared}) {{
  return launched("{name}", blockDim, stream, {cores}, [=] {{ {name}({passed}); }});
}}
"""
BEFORE = """#include "{source}"
#include "pretended.h"
#include <unistd.h>
namespace {{
// PRETENDED_HANGS and PRETENDED_CRASHES name the kernel that hangs or crashes.
bool is_named(const char *what, const char *name) {{
  const char *named = std::getenv(what);
  return named != nullptr && std::string(named) == name;
}}
uint32_t launched(const char *name, uint32_t blocks, void *stream, uint32_t cores,
                  const std::function<void()> &kernel) {{
  if (stream == nullptr || stream != pretended_expected()) {{
    pretended_fault(name, stream == nullptr ? "no stream" : "a stream of another launch");
    return 107003;
  }}
  if (pretended_fails()) {{
    pretended_fault(name, "the launch fails");
    return 207001;
  }}
  while (is_named("PRETENDED_HANGS", name)) sleep(1);
  if (is_named("PRETENDED_CRASHES", name)) std::abort();
  AscendC::emulator::gm_is_live = pretended_is_live;
  AscendC::emulator::Report report;
  try {{
    AscendC::emulator::launch(blocks * cores, report, kernel);
  }} catch (const std::exception &error) {{
    pretended_fault(name, error.what());
    return 507015;  // an exception of an AI core
  }}
  return 0;
}}
}}  // namespace
"""
# vector cores a block
CORES = {"KERNEL_TYPE_AIV_ONLY": 1, "KERNEL_TYPE_MIX_AIC_1_1": 1, "KERNEL_TYPE_MIX_AIC_1_2": 2}


def main(preprocessed: str, source: str, stub: str, headers: str) -> None:
    """Write the stub and the headers.

    Exit with a reason where an entry point cannot be launched.
    """
    made = [BEFORE.format(source=source)]
    Path(headers).mkdir(parents=True, exist_ok=True)
    # name, arguments, body, again and again
    _, *entries = ENTRY.split(Path(preprocessed).read_text())
    for name, arguments, body in zip(entries[::3], entries[1::3], entries[2::3], strict=True):
        declared_kinds = set(KIND.findall(body))
        if len(declared_kinds) != 1 or not declared_kinds <= set(CORES):
            sys.exit(f"{name}: kernel type {declared_kinds or 'not declared'}")
        (core_kind,) = declared_kinds
        each = [argument.split() for argument in arguments.split(",")]
        unknown = {kind for kind, _ in each} - {"GM_ADDR", "uint32_t"}
        if unknown:
            sys.exit(f"{name}: arguments of type {unknown}: a launch takes addresses and uint32_t")
        declared = "".join(
            f", {'void *' if kind == 'GM_ADDR' else 'uint32_t '}{word}" for kind, word in each
        )
        passed = ", ".join(f"(GM_ADDR){word}" if kind == "GM_ADDR" else word for kind, word in each)
        Path(headers, f"aclrtlaunch_{name}.h").write_text(
            HEADER.format(name=name, declared=declared)
        )
        made.append(
            STUB.format(name=name, declared=declared, passed=passed, cores=CORES[core_kind])
        )
    Path(stub).write_text("".join(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
