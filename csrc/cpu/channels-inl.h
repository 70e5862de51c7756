// Walks over the elements of a block, channel by channel.
// Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "operands-inl.h"

// An element of the result, its channel, and how many elements of that channel are left from it on. Moving on costs no
// division until a group of channels ends.
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

// Calls f(k, run, channel) for each run of one channel in the next n elements, and moves on past them.
template <class F>
QT_FN void for_runs(const Channels& c, Cursor& at, int n, F f) {
  for (int k = 0; k < n;) {
    const int run = static_cast<int>(smaller(at.left, n - k));
    f(k, run, at.channel);
    advance(c, at, run);
    k += run;
  }
}

// The walks below go over the next n elements and move their cursor past them.
//
// Calls one(at, chunks, channel) for chunks that lie within a channel, and mixed(at, cursor) for a chunk that does not,
// which is to move the cursor past it. `at` counts from where the walk begins.
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

// Where neighbouring elements have neighbouring channels: a row of them for each group, again and again until the group
// ends. An element, its channel, and how many elements are left of its row and of its group.
struct RowCursor {
  int64_t channel, row_left, group_left;
};

QT_FN RowCursor row_cursor_at(const Channels& c, int64_t i) {
  const int64_t group = i / c.group_span, within = i - group * c.group_span, position = within % c.size;
  return {group * c.size + position, c.size - position, c.group_span - within};
}

// By no more than what is left of the row.
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

// Calls f(k, length, channel) for each piece of a row in the next n elements, and moves on past them.
template <class F>
QT_FN void for_rows(const Channels& c, RowCursor& at, int n, F f) {
  for (int k = 0; k < n;) {
    const int length = static_cast<int>(smaller(at.row_left, n - k));
    f(k, length, at.channel);
    advance(c, at, length);
    k += length;
  }
}

// Calls row(at, chunks, channel) for chunks that lie within a row, and mixed(at, cursor) for a chunk that does not,
// which is to move the cursor past it.
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

// Calls f(at, chunks, place in the row) for as many chunks at a time as lie in the row of scales without a wrap.
template <class F>
QT_FN void walk_row(const Channels& c, int64_t& place, int n, F f) {
  for (int at = 0; at < n;) {
    const int64_t whole = (c.size - place) / kChunk;  // the row has a chunk more at its end
    const int chunks = static_cast<int>(smaller(whole + 1, (n - at + kChunk - 1) / kChunk));
    f(at, chunks, place);
    at += chunks * kChunk;
    place += chunks * kChunk;
    if (place >= c.size) place %= c.size;
  }
}

// Where a range of work stands: found once, by divisions, and moved on from block to block. Channels in rows have the
// latter two, of which a walk moves one.
struct Place {
  Cursor channel;
  RowCursor rows;
  int64_t row;
};

QT_FN Place place_at(const Channels& c, int64_t i) {
  if (c.count <= 1) return {};
  return c.inner > 1 ? Place{cursor_at(c, i), {}, 0} : Place{{}, row_cursor_at(c, i), i % c.size};
}
