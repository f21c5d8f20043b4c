// What the pretended device has beside CANN's own names: a table of its memory, and its last fault.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
void *pretended_allocate(size_t bytes);
void pretended_free(void *at);
bool pretended_is_live(const void *at, uint64_t bytes);  // all of it is allocated, and was not freed
void pretended_fail(int launches);                       // the launch after so many returns an error, and does nothing
int pretended_armed();                                   // it has not come yet
bool pretended_fails();                                  // asked by each launch
void pretended_fault(const char *kernel, const char *why);
void pretended_expect(void *stream);  // the stream of the thread that queued the launch which runs now
void *pretended_expected();
const char *pretended_last_fault();  // "" = none; taken away by the call
}
