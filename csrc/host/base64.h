// Base64 (RFC 4648, section 4) as servers send routing in: nothing but its 64 characters, and padding at
// the end. megarl/ops/routing_codec.py has the reference, Python's own in its strict mode.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace megarl {

constexpr uint32_t kNoBase64 = 0x80000000;  // beyond the 24 bits of four characters

// tables[p][c]: the bits of character c at place p of four, in the order of their bytes in memory.
inline std::array<std::array<uint32_t, 256>, 4> base64_tables() {
  const char* alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::array<std::array<uint32_t, 256>, 4> tables;
  for (auto& table : tables) table.fill(kNoBase64);
  for (uint32_t value = 0; value < 64; ++value) {
    for (int place = 0; place < 4; ++place) {
      const uint32_t bits = value << (18 - 6 * place);  // the first byte is the highest
      tables[place][static_cast<uint8_t>(alphabet[value])] =
          (bits >> 16) | (bits & 0xff00) | ((bits & 0xff) << 16);
    }
  }
  return tables;
}

// Bytes that `length` characters become; -1 if so many, or this padding, cannot be.
inline int64_t base64_bytes(const char* text, int64_t length) {
  if (length % 4 != 0) return -1;
  if (length == 0) return 0;
  const int padding = (text[length - 1] == '=') + (text[length - 1] == '=' && text[length - 2] == '=');
  return length / 4 * 3 - padding;
}

// `out` holds base64_bytes(text, length). False where a character is none of the 64.
inline bool decode_base64(const char* text, int64_t length, uint8_t* out) {
  static const auto tables = base64_tables();
  const auto* in = reinterpret_cast<const uint8_t*>(text);
  const int64_t num_bytes = base64_bytes(text, length);
  uint32_t seen = 0;
  auto four = [&](const uint8_t* at) {
    const uint32_t bits =
        tables[0][at[0]] | tables[1][at[1]] | tables[2][at[2]] | tables[3][at[3]];
    seen |= bits;
    return bits;
  };
  const int64_t whole = num_bytes / 3;
  for (int64_t i = 0; i < whole; ++i, in += 4, out += 3) {
    const uint32_t bits = four(in);
    out[0] = static_cast<uint8_t>(bits);
    out[1] = static_cast<uint8_t>(bits >> 8);
    out[2] = static_cast<uint8_t>(bits >> 16);
  }
  if (const int64_t rest = num_bytes - 3 * whole; rest > 0) {
    const uint8_t last[4] = {in[0], in[1], rest == 2 ? in[2] : uint8_t{'A'}, uint8_t{'A'}};
    const uint32_t bits = four(last);
    out[0] = static_cast<uint8_t>(bits);
    if (rest == 2) out[1] = static_cast<uint8_t>(bits >> 8);
  }
  return (seen & kNoBase64) == 0;
}

}  // namespace megarl
