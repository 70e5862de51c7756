// Iteration over the elements of a block, channel by channel. Included once per instruction set, inside namespace
// qtoolkit::QT_ISA.
#pragma once

#include "operands-inl.h"

// The position of an element of the result: its index, its channel, the elements left in the channel and the channels
// left in the group. To advance takes no division until a group of channels ends.
struct Cursor {
  int64_t i, channel, left, channels_left;
};

QT_FN Cursor cursor_at(const Channels& c, int64_t i) {
  const int64_t run = i / c.inner;
  return {i, channel_of(c, i), c.inner - (i - run * c.inner), c.size - run % c.size};
}

QT_FN void advance(const Channels& c, Cursor& at, int64_t n) {
  at.i += n;
  at.left -= n;
  if (at.left > 0) return;
  if (--at.channels_left == 0) {
    at = cursor_at(c, at.i);
  } else {
    at.left = c.inner;
    ++at.channel;
  }
}

// Calls f(k, run, channel) for each run of one channel in the next n elements, and advances past them.
template <class F>
QT_FN void for_runs(const Channels& c, Cursor& at, int n, F f) {
  for (int k = 0; k < n;) {
    const int run = static_cast<int>(smaller(at.left, n - k));
    f(k, run, at.channel);
    advance(c, at, run);
    k += run;
  }
}

// The functions below iterate over the next n elements and advance their cursor past them.
//
// Calls one(at, chunks, channel) for chunks within one channel, and mixed(at, cursor) for a chunk of several channels;
// mixed advances the cursor itself. `at` counts from the first of the n elements.
template <class One, class Mixed>
QT_FN void walk_channels(const Channels& c, Cursor& cursor, int n, One one, Mixed mixed) {
  if (c.count == 1) return one(0, round_up(n) / kChunk, int64_t{0});
  for (int at = 0; at < n;) {
    const int chunks = cursor.left >= n - at ? round_up(n - at) / kChunk : static_cast<int>(cursor.left / kChunk);
    if (chunks == 0) {
      mixed(at, cursor);
      at += kChunk;
      continue;
    }
    one(at, chunks, cursor.channel);
    at += chunks * kChunk;
    advance(c, cursor, chunks * kChunk);
  }
}

// The position of an element where consecutive elements have consecutive channels: each group consists of equal rows of
// channels. The channel, and the elements left in the row and in the group.
struct RowCursor {
  int64_t channel, row_left, group_left;
};

QT_FN RowCursor row_cursor_at(const Channels& c, int64_t i) {
  const int64_t group = i / c.group_span, within = i - group * c.group_span, position = within % c.size;
  return {group * c.size + position, c.size - position, c.group_span - within};
}

// n is at most what is left of the row.
QT_FN void advance(const Channels& c, RowCursor& at, int64_t n) {
  at.channel += n;
  at.row_left -= n;
  at.group_left -= n;
  if (at.row_left > 0) return;
  at.row_left = c.size;
  if (at.group_left == 0) {
    at.group_left = c.group_span;
  } else {
    at.channel -= c.size;
  }
}

// Calls f(k, length, channel) for each part of a row in the next n elements, and advances past them.
template <class F>
QT_FN void for_rows(const Channels& c, RowCursor& at, int n, F f) {
  for (int k = 0; k < n;) {
    const int length = static_cast<int>(smaller(at.row_left, n - k));
    f(k, length, at.channel);
    advance(c, at, length);
    k += length;
  }
}

// Calls row(at, chunks, channel) for chunks within one row, and mixed(at, cursor) for a chunk that crosses rows; mixed
// advances the cursor itself.
template <class Row, class Mixed>
QT_FN void walk_rows(const Channels& c, RowCursor& cursor, int n, Row row, Mixed mixed) {
  for (int at = 0; at < n;) {
    const int chunks = static_cast<int>(smaller(cursor.row_left, n - at) / kChunk);
    if (chunks == 0) {
      mixed(at, cursor);
      at += kChunk;
      continue;
    }
    row(at, chunks, cursor.channel);
    advance(c, cursor, chunks * kChunk);
    at += chunks * kChunk;
  }
}

// Calls f(at, chunks, position in the row) for as many chunks as the row of scales holds without a wrap.
template <class F>
QT_FN void walk_row(const Channels& c, int64_t& position, int n, F f) {
  for (int at = 0; at < n;) {
    const int64_t whole = (c.size - position) / kChunk;  // the row is followed by one more chunk
    const int chunks = static_cast<int>(smaller(whole + 1, (n - at + kChunk - 1) / kChunk));
    f(at, chunks, position);
    at += chunks * kChunk;
    position += chunks * kChunk;
    if (position >= c.size) position %= c.size;
  }
}

// The position of a thread in its range. It is found once, with divisions, and advanced from block to block. Layouts
// with rows of channels use one of the last two members.
struct Position {
  Cursor channel;
  RowCursor rows;
  int64_t row;
};

QT_FN Position position_at(const Channels& c, int64_t i) {
  if (c.count <= 1) return {};
  return c.inner > 1 ? Position{cursor_at(c, i), {}, 0} : Position{{}, row_cursor_at(c, i), i % c.size};
}
