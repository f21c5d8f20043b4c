#pragma once
#include "acl_base.h"
using aclError = int;
extern "C" aclError aclrtSynchronizeStream(aclrtStream stream);
