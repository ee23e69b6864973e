// Finds which scores are live: those of eight neighbouring tokens of the other side together, and of one token one by
// one.
//
// A warp owns 16 rows of the tile, its warp tile; live blocks are at least 8 tokens wide, so that one bit for each 8
// tokens of the other side says all about rows l and one about l + 8.

#pragma once

#include <cstdint>

#include "../../packing.h"
#include "block_spans.h"
#include "scoring.h"

namespace ds_sparse::attention {

// Eight neighbouring tokens of the other side: the first, and its owners, a bit for each block row of the tile whose
// list has their block. None: 0 owners.
struct Octet {
  static constexpr uint32_t kBiased = 1 << 8;  // beside the owners: some of them have a bias
  static constexpr int kLeft = 16;             // from this bit on: how many of a group of 16 exist; 0: all
  int token;
  uint32_t owners;

  __device__ void apply(KeyState state) {
    owners = state == kAllMasked ? 0 : state == kSomeBias && owners != 0 ? owners | kBiased : owners;
  }
};

// The tokens of the other side that a work tile walks, kTokens in a step. kPacked: blocks have the tokens that spans
// say.
template <int kTokens, bool kPacked = false>
struct OtherSide {
  const uint32_t* entries;
  int num_entries, log_block, length;  // tokens that exist
  const uint8_t* states;               // of keys; null: nothing is added to any, or they are no keys
  const int2* spans = nullptr;         // of the entries

  __device__ int steps() const { return ((num_entries << log_block) + kTokens - 1) / kTokens; }

  __device__ __forceinline__ Octet octet(int step, int number) const {
    const int place = step * kTokens + number * 8, entry = place >> log_block;
    return entry < num_entries ? octets(entries[entry], {0, 0}, place, 1) : Octet{0, 0};
  }
  // Sixteen neighbouring tokens, of blocks of 16 or more, as their first eight. `entry`, with its span: that of their
  // place among the tokens of all entries, or, where there are not as many, any.
  __device__ __forceinline__ Octet group(uint32_t entry, int2 span, int place) const {
    return place >> log_block < num_entries ? octets(entry, span, place, 2) : Octet{0, 0};
  }

  // The token at `row` of a step, or -1.
  __device__ __forceinline__ int token(int step, int tile_row) const {
    const int place = step * kTokens + tile_row, entry = place >> log_block;
    if (entry >= num_entries) {
      return -1;
    }
    const int token = static_cast<int>(block_of(entries[entry]) << log_block) + (place & ((1 << log_block) - 1));
    return token < length ? token : -1;
  }

 private:
  __device__ __forceinline__ Octet octets(uint32_t entry, int2 span, int place, int count) const {
    const int in_block = place & ((1 << log_block) - 1);
    Octet octet{static_cast<int>(block_of(entry) << log_block) + in_block, owners_of(entry)};
    if constexpr (kPacked) {
      const int left = span.y - in_block;
      octet.owners = left <= 0          ? 0
                     : left < 8 * count ? octet.owners | Octet::kBiased | left << Octet::kLeft
                                        : octet.owners;
      return octet;
    }
    if (octet.token >= length) {
      octet.owners = 0;
    } else if (states != nullptr) {
      const uint8_t* state = states + octet.token / 8;
      const bool alike = count == 1 || octet.token + 8 >= length || state[0] == state[1];
      octet.apply(alike ? static_cast<KeyState>(*state) : kSomeBias);
    }
    return octet;
  }
};

// Holds which of a warp tile's scores with kTokens tokens are live. Bit n: rows l of the warp tile, and bit 8 + n rows
// l + 8, with octet n; `ragged`: elements of that octet are looked at one by one, as some do not exist, come after or
// have a bias.
template <int kTokens>
struct LiveOctets {
  static constexpr int kOctets = kTokens / 8;
  static constexpr uint32_t kAll = ((1u << kOctets) - 1) * 0x101u;
  uint32_t bits = 0, ragged = 0;

  LiveOctets() = default;

  // By a whole warp. `whole(octet)`: whether no element of it has to be looked at.
  template <class F>
  __device__ __forceinline__ LiveOctets(const Octet* octets, int log_block, const F& whole) {
    const int lane = threadIdx.x % 32, warp_tile = threadIdx.x / 32;
    const int number = lane % 8;
    bool flag = false;
    if (number < kOctets) {
      const Octet octet = octets[number];
      if (lane < 16) {
        const int block_row = min((warp_tile * 16 + lane / 8 * 8) >> log_block, 7);
        flag = octet.owners >> (log_block >= 6 ? 0 : block_row) & 1;
      } else if (lane < 24) {
        flag = octet.owners != 0 && ((octet.owners & Octet::kBiased) != 0 || !whole(octet));
      }
    }
    const uint32_t votes = __ballot_sync(0xffffffffu, flag);
    bits = votes & 0xffffu;
    ragged = votes >> 16 & 0xffu;
  }

  __device__ bool all() const { return bits == kAll && ragged == 0; }
  __device__ bool none() const { return bits == 0; }
  // Tells if any of 16 tokens counts for any row of the warp tile.
  __device__ bool group(int j) const { return (bits >> 2 * j & 0x303u) != 0; }
};

// The view that a token of one side has of the other, element by element. kTransposed: the token is a key. Where it
// does not exist, -1, nobody looks.
template <bool kTransposed, Limits kLimits>
struct TokenMask {
  Range range, global;
  const int32_t* places;  // null: causality does not go by them
  int place, length;
  const ChosenBlocks* chosen;  // null: none has to be looked at
  int64_t first_word;          // of the chosen blocks of its head
  int own;

  __device__ __forceinline__ TokenMask(const Scoring& scoring, int batch, int head, int token)
      : TokenMask(scoring, batch, head, token, scoring.limits_of(head, token), scoring.place_of(head, token)) {}

  // limits and place: the token's, as a window has them.
  __device__ __forceinline__ TokenMask(const Scoring& scoring, int batch, int head, int token, Range limits, int place)
      : range(scoring.template range_of<kTransposed, kLimits>(batch, token)),
        global{0, 0},
        places(nullptr),
        place(place),
        length(0),
        chosen(nullptr),
        first_word(0),
        own(max(token, 0)) {
    if (by_choice(kLimits) && scoring.chosen.bits != nullptr) {
      chosen = &scoring.chosen;
      first_word = chosen->first_word(batch, head);
    }
    if constexpr (by_window(kLimits)) {
      global = Range{0, scoring.window.num_global}.within(range);
      range = limits.within(range);
      places = scoring.goes_by_places() ? scoring.window.places_of(head) : nullptr;
      length = kTransposed ? scoring.queries : scoring.keys;
    }
  }

  // But for causality by places.
  __device__ __forceinline__ bool has(int token) const {
    return range.has(token) | (by_window(kLimits) && global.has(token));
  }
  __device__ __forceinline__ bool is_in_order(int token) const {
    return places == nullptr ||
           (kTransposed ? place <= places[min(token, length - 1)] : places[min(token, length - 1)] <= place);
  }

  // Tells if the query of the two has chosen the key's block.
  __device__ __forceinline__ bool has_chosen(int token) const {
    if (!by_choice(kLimits) || chosen == nullptr) {
      return true;
    }
    const int other = max(0, min(token, range.end - 1));
    return chosen->has(first_word, kTransposed ? other : own, kTransposed ? own : other);
  }
  __device__ __forceinline__ bool sees(int token) const {
    return has(token) && is_in_order(token) && has_chosen(token);
  }

  // Leaves what all 16 rows of a warp tile see, of which lanes l and l + 16 have row l. By a whole warp.
  __device__ __forceinline__ void restrict_to_warp_tile(bool exists) {
    const auto of_all = [&](Range own) {
      return Range{
          __reduce_max_sync(0xffffffffu, exists ? own.first : 0),
          __reduce_min_sync(0xffffffffu, exists ? own.end : INT32_MAX)};
    };
    range = of_all(range);
    global = of_all(global);
  }
  // Tells if eight neighbouring tokens are all seen, so that none has to be looked at.
  __device__ __forceinline__ bool has_all(int token) const {
    return places == nullptr && (!by_choice(kLimits) || chosen == nullptr || !chosen->differs_in_warp_tile()) &&
           (range.has(token, 8) || (by_window(kLimits) && global.has(token, 8)));
  }
};

}  // namespace ds_sparse::attention
