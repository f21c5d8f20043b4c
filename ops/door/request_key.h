// The key of a request: what the door decides by, and nothing else.
//
// It is the request line, the header lines that the door reads, and the tenant that the body names. Two requests with
// the same key get the same decision. Whatever is not plainly one whole HTTP/1.1 request has no key: it goes to the
// door, which frames it (npu_gr/server/entrance/framing.py).
#ifndef NPU_GR_DOOR_REQUEST_KEY_H
#define NPU_GR_DOOR_REQUEST_KEY_H

#include <stdint.h>
#include <string.h>

namespace {

enum { MAX_NAMES = 8, MAX_DIGITS = 15, MAX_KEY_BYTES = 2048, SEARCHED_BYTES = 2048, MAX_TENANT_BYTES = 256 };

struct Text {
  const char *data;
  int64_t size;
};

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Whether a text is `name`, which is in lower case.
bool is_named(Text text, const char *name) {
  int64_t n = 0;
  for (; n < text.size && name[n]; ++n)
    if (lower(text.data[n]) != name[n]) return false;
  return n == text.size && !name[n];
}

Text trimmed(Text text) {
  while (text.size && (text.data[0] == ' ' || text.data[0] == '\t')) ++text.data, --text.size;
  while (text.size && (text.data[text.size - 1] == ' ' || text.data[text.size - 1] == '\t')) --text.size;
  return text;
}

struct Key {
  char data[MAX_KEY_BYTES];
  int64_t size = 0;

  bool add(const char *from, int64_t count) {
    if (size + count > MAX_KEY_BYTES) return false;
    if (count) memcpy(data + size, from, count);
    size += count;
    return true;
  }
};

// The tenant in a JSON body: "tenant"\s*:\s*"([^"\\]{1,256})", the first match.
Text json_tenant(const char *body, int64_t size) {
  static const char mark[] = "\"tenant\"";
  const char *end = body + size;
  for (const char *at = body; (at = static_cast<const char *>(memmem(at, end - at, mark, 8))); ++at) {
    const char *next = at + 8;
    while (next < end && is_space(*next)) ++next;
    if (next == end || *next++ != ':') continue;
    while (next < end && is_space(*next)) ++next;
    if (next == end || *next++ != '"') continue;
    int64_t count = 0;
    while (next + count < end && count <= MAX_TENANT_BYTES && next[count] != '"' && next[count] != '\\') ++count;
    if (count >= 1 && count <= MAX_TENANT_BYTES && next + count < end && next[count] == '"') return {next, count};
  }
  return {nullptr, 0};
}

Text msgpack_tenant(const char *body, int64_t size) {
  const char *end = body + size;
  const char *at = static_cast<const char *>(memmem(body, size, "\xa6tenant", 7));
  if (!at || (at += 7) == end) return {nullptr, 0};
  const int marker = static_cast<unsigned char>(*at);
  int64_t count = -1;
  if (marker >= 0xa0 && marker <= 0xbf)
    count = marker & 0x1f, at += 1;
  else if (marker == 0xd9 && end - at >= 2)
    count = static_cast<unsigned char>(at[1]), at += 2;
  if (count < 0) return {nullptr, 0};
  return {at, count < end - at ? count : end - at};
}

// As `tenant_of` of npu_gr/server/entrance/framing.py.
bool add_tenant(Key &key, const char *body, int64_t size) {
  char ends[2 * SEARCHED_BYTES];
  if (size > 2 * SEARCHED_BYTES) {
    memcpy(ends, body, SEARCHED_BYTES);
    memcpy(ends + SEARCHED_BYTES, body + size - SEARCHED_BYTES, SEARCHED_BYTES);
    body = ends;
    size = 2 * SEARCHED_BYTES;
  }
  const Text tenant = size && body[0] == '{' ? json_tenant(body, size) : msgpack_tenant(body, size);
  return key.add("\0", 1) && key.add(tenant.data, tenant.size);
}

// Make the key of `data`; false: it is not plainly one whole request.
bool make_key(const char *data, int64_t size, const char *const *names, Key &key) {
  const char *end = static_cast<const char *>(memmem(data, size, "\r\n\r\n", 4));
  if (!end) return false;
  const char *line_end = static_cast<const char *>(memchr(data, '\r', end + 1 - data));
  if (line_end - data < 9 || line_end[1] != '\n' || memchr(data, '\n', line_end - data)) return false;
  if (memcmp(line_end - 9, " HTTP/1.1", 9) || !key.add(data, line_end - data)) return false;
  int64_t body_bytes = -1;
  for (const char *at = line_end + 2; at < end + 2; at = line_end + 2) {
    line_end = static_cast<const char *>(memchr(at, '\r', end + 1 - at));
    if (line_end[1] != '\n' || memchr(at, '\n', line_end - at)) return false;
    const char *colon = static_cast<const char *>(memchr(at, ':', line_end - at));
    if (!colon || colon == at || memchr(at, ' ', colon - at) || memchr(at, '\t', colon - at)) return false;
    const Text name = {at, colon - at}, value = trimmed({colon + 1, line_end - colon - 1});
    if (is_named(name, "content-length")) {
      if (body_bytes >= 0 || !value.size || value.size > MAX_DIGITS) return false;
      body_bytes = 0;
      for (int64_t n = 0; n < value.size; ++n) {
        if (value.data[n] < '0' || value.data[n] > '9') return false;
        body_bytes = 10 * body_bytes + (value.data[n] - '0');
      }
    } else if (is_named(name, "connection")) {
      if (!is_named(value, "keep-alive")) return false;
    } else if (is_named(name, "transfer-encoding") || is_named(name, "expect") || is_named(name, "upgrade")) {
      return false;
    } else {
      for (int n = 0; names[n]; ++n)
        if (is_named(name, names[n]) && !key.add(at, line_end + 2 - at)) return false;
    }
  }
  if (body_bytes < 0) body_bytes = 0;
  if (size != end + 4 - data + body_bytes) return false;
  return add_tenant(key, end + 4, body_bytes);
}

}  // namespace

#endif
