/* A forward of a decoder: embeddings, layers, the last norm, the head. ``struct decoder`` is a model as
   ``targets/native`` fills it, ``struct batch`` the rows of all sequences, one after the other, without padding. */

#pragma once

#include "attention.h"
#include "attention_amx.h"
#include "products.h"

typedef int attending(const struct rows *, const struct heads *, int, int, int, int);

struct entering {
    const struct rows *rows;
    const struct heads *heads;
    attending *form;
    int tiles, failed; /* ``tiles``: of a sequence and a head, at most */
};

static void enter_row(void *given, int64_t row) {
    const struct entering *const job = given;
    enter(job->rows, job->heads, row);
}

static void attend_tile(void *given, int64_t item) {
    struct entering *const job = given;
    const struct rows *const rows = job->rows;
    const int part = (int)(item / job->tiles), sequence = part / rows->shared, from = (int)(item % job->tiles) * TILE;
    const int queries = (rows->begin[sequence + 1] - rows->begin[sequence]) * (rows->heads / rows->shared);
    if (from < queries && job->form(rows, job->heads, sequence, part % rows->shared, from,
                                    from + TILE < queries ? from + TILE : queries))
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
}

/* Rotate a layer's queries and keys, write its keys and values to the cache, attend. Returns 1 if out of memory. */
int attention(const struct rows *rows, const struct heads *heads) {
    int64_t work = 0;
    int most = 0;
    for (int row = 0; row < rows->rows; row++) work += (int64_t)rows->count[row] * rows->heads * rows->size;
    for (int i = 0; i < rows->sequences; i++)
        most = rows->begin[i + 1] - rows->begin[i] > most ? rows->begin[i + 1] - rows->begin[i] : most;
    const int tiles = (most * (rows->heads / rows->shared) + TILE - 1) / TILE;
    struct entering job = {rows, heads, attend, tiles, 0};
#ifdef SQUARED
    if (squared()) job.form = attend_squared;
#endif
    const int64_t items = (int64_t)rows->sequences * rows->shared * tiles;
    if (work > 4 * CHUNK) {
        share(rows->rows, enter_row, &job);
        share(items, attend_tile, &job);
    } else {
        for (int row = 0; row < rows->rows; row++) enter_row(&job, row);
        for (int64_t item = 0; item < items; item++) attend_tile(&job, item);
    }
    return job.failed;
}

/* A layer. Attention and the feed-forward part read the norm of its input (``before``, ``between``) and add the norm of
   what they give (``after``, ``last``) to it: one after the other, or both to the same input if it is ``parallel``. Norms
   of kind NO_NORM are left out. */
struct layer {
    struct product joined, output, gates, down; /* queries, keys and values; gate and up, or up alone */
    struct norm before, after, between, last;
    struct norm queries, keys;           /* of all heads together */
    struct norm each_query, each_key;    /* of each head */
    float scale, cap, residual;          /* of scores; what is added to the input is multiplied by ``residual`` */
    int32_t heads, shared, size;         /* ``shared``: heads that have keys */
    int32_t view, cached;                /* the numbers of its view, and of its keys and values in the cache */
    int32_t activation, gated, parallel; /* 0 or 1, but the first, an ``enum activation`` */
};

/* The columns that some layers attend to, and the angles that they rotate by. */
struct view {
    int32_t window;              /* columns that a row sees at most, its own too; 0: all */
    int32_t sinks, recent;       /* committed rows that are seen, the first and the last ones; 0 and 0: all */
    int32_t rotary, interleaved; /* as in ``struct rows`` */
    const real *cosine, *sine;   /* [positions, rotary] */
};

struct decoder {
    int32_t layers, views;
    int64_t hidden;
    const struct layer *layer;
    const struct view *view;
    const real *embeddings; /* [vocabulary, hidden] */
    float embedding;        /* embeddings are multiplied by it */
    struct norm norm;
    struct product head;    /* without outputs, rows are read as they are */
    float logit, cap;       /* logits are multiplied by ``logit``, then bent below ``cap`` unless that is 0 */
};

/* Sequences of a batch whose keys and values lie in the same buffers. */
struct lane {
    int32_t first, end;
    void *const *buffers;                         /* [layers, 2] */
    const int64_t *sequence_stride, *head_stride; /* [layers], in numbers */
};

struct batch {
    int32_t sequences, lanes, read;
    const int32_t *begin;   /* [sequences + 1]: the first row of each */
    const int32_t *seat;    /* [sequences]: its place in the buffers */
    const int32_t *past;    /* [sequences]: its committed rows */
    const int32_t *fed;     /* [sequences]: how many of the last of these are nodes of its tree, before its rows */
    const int32_t *parents; /* [nodes of each sequence's tree]: a node before it, or -1 */
    const int32_t *tokens;  /* [rows] */
    const int32_t *rows;    /* [read]: rows whose logits are wanted */
    const struct lane *lane;
    const real *inputs;     /* [rows, hidden], in place of embeddings; or NULL */
};

/* Workspace and results of a forward. */
struct forward_room {
    real *state, *added, *joined, *attended, *both, *inner, *picked;
    float *queries;
    int32_t *numbers, *columns;      /* [views, PER_ROW, rows]; ``listed`` */
    struct held *held;               /* [sequences] */
    real *const *states;             /* of each layer's result, [rows, hidden] */
    real *normed, *logits;           /* all rows after the last norm, or NULL; [read, outputs of the head] */
};

enum { PER_ROW = 8 };

/* How many of a tree's nodes are a chain from its first one on. */
static int chain_of(const int32_t *parents, int nodes) {
    int count = 0;
    while (count < nodes && parents[count] == count - 1) count++;
    return count;
}

static int depth_of(const int32_t *parents, int node) {
    int depth = 0;
    for (; node >= 0; node = parents[node]) depth++;
    return depth;
}

static int hides(const struct view *view, int past) {
    return view->sinks + view->recent && past > view->sinks + view->recent;
}

/* The number of columns that the views of a batch list one by one. */
int64_t listed(const struct decoder *model, const struct batch *batch) {
    int64_t most = 0;
    for (int i = 0; i < model->views; i++) {
        const int32_t *parents = batch->parents;
        for (int s = 0; s < batch->sequences; s++) {
            const int fed = batch->fed[s], nodes = fed + batch->begin[s + 1] - batch->begin[s];
            const int chain = chain_of(parents, nodes), hidden = hides(model->view + i, batch->past[s]);
            for (int node = fed; node < nodes; node++) {
                if (hidden) most += model->view[i].recent;
                if (hidden || node >= chain) most += depth_of(parents, node);
            }
            parents += nodes;
        }
    }
    return most;
}

/* Where the columns of rows are noted, as in ``struct rows``. */
struct noted {
    int32_t *first, *run, *count, *start, *place, *angle, *columns;
};

/* Note the columns of a row: committed rows, and the nodes that its own one hangs under, up to itself.

   They are in the order of the text, so a window leaves out the first ones. */
static int note(const struct view *view, const struct noted *to, int row, int past, int fed, const int32_t *parents,
                int chain, int node, int start) {
    const int committed = past - fed, hidden = hides(view, past);
    const int depth = node < chain ? node + 1 : depth_of(parents, node);
    int run = hidden ? view->sinks : committed, listed = 0;
    int32_t *const columns = to->columns + start;
    to->place[row] = committed + node;
    to->angle[row] = committed + depth - 1;
    if (hidden)
        for (int column = past - view->recent; column < committed; column++) columns[listed++] = column;
    if (!hidden && node < chain) run += depth;
    else {
        int at = node;
        for (int i = depth - 1; i >= 0; i--, at = parents[at]) columns[listed + i] = committed + at;
        listed += depth;
    }
    const int all = committed + depth, skip = view->window && all > view->window ? all - view->window : 0;
    const int behind = hidden ? past - view->recent : run; /* position of the first column that is listed */
    const int of_run = skip < run ? skip : run, of_list = skip > behind ? skip - behind : 0;
    to->first[row] = of_run;
    to->run[row] = run - of_run;
    to->count[row] = run - of_run + listed - of_list;
    to->start[row] = start + of_list;
    return start + listed;
}

/* The rows of a batch as the layers of each view see them, [views]. */
static void survey_batch(const struct decoder *model, const struct batch *batch, const struct forward_room *room,
                         struct rows *views) {
    const int rows = batch->begin[batch->sequences];
    int end = 0;
    for (int i = 0; i < model->views; i++) {
        const struct view *const view = model->view + i;
        int32_t *const own = room->numbers + (int64_t)i * PER_ROW * rows;
        int32_t *const order = own + 6 * rows, *const sequence = own + 7 * rows;
        const struct noted to = {own, own + rows, own + 2 * rows, own + 3 * rows, own + 4 * rows, own + 5 * rows,
                                 room->columns};
        const int32_t *parents = batch->parents;
        for (int s = 0; s < batch->sequences; s++) {
            const int fed = batch->fed[s], begin = batch->begin[s], nodes = fed + batch->begin[s + 1] - begin;
            const int chain = chain_of(parents, nodes);
            for (int node = fed; node < nodes; node++) {
                const int row = begin + node - fed;
                order[row] = row;
                sequence[row] = s;
                end = note(view, &to, row, batch->past[s], fed, parents, chain, node, end);
            }
            parents += nodes;
        }
        views[i] = (struct rows){.rows = rows, .sequences = batch->sequences, .rotary = view->rotary,
                                 .interleaved = view->interleaved, .order = order, .begin = batch->begin,
                                 .sequence = sequence, .place = to.place, .first = to.first, .run = to.run,
                                 .count = to.count, .start = to.start, .columns = to.columns, .angle = to.angle,
                                 .cosine = view->cosine, .sine = view->sine, .queries = room->queries};
    }
}

/* Attention of a layer's rows, from what its joined product gave. Returns 1 if out of memory. */
static int attend_layer(const struct layer *own, const struct batch *batch, const struct forward_room *room,
                        const struct rows *view) {
    const int64_t size = own->size, queries = own->heads * size, keys = own->shared * size, width = queries + 2 * keys;
    struct rows rows = *view;
    rows.heads = own->heads, rows.shared = own->shared, rows.size = own->size;
    if (own->queries.kind) norm_rows(&own->queries, rows.rows, queries, room->joined, width, room->joined, width);
    if (own->keys.kind)
        norm_rows(&own->keys, rows.rows, keys, room->joined + queries, width, room->joined + queries, width);
    for (int i = 0; i < batch->lanes; i++) {
        const struct lane *lane = batch->lane + i;
        real *const *buffers = (real *const *)lane->buffers + 2 * own->cached;
        for (int s = lane->first; s < lane->end; s++) {
            const int64_t at = batch->seat[s] * lane->sequence_stride[own->cached];
            room->held[s] = (struct held){buffers[0] + at, buffers[1] + at, lane->head_stride[own->cached]};
        }
    }
    const struct heads heads = {.query = room->joined, .key = room->joined + queries,
                                .value = room->joined + queries + keys, .query_stride = width, .key_stride = width,
                                .value_stride = width, .scale = own->scale, .cap = own->cap,
                                .each_query = &own->each_query, .each_key = &own->each_key, .held = room->held,
                                .out = room->attended};
    return attention(&rows, &heads);
}

struct adding {
    int64_t count, each;
    const real *given, *more;
    float factor;
    real *out;
};

static void add_some(void *given, int64_t chunk) {
    const struct adding *const job = given;
    const int64_t end = (chunk + 1) * job->each < job->count ? (chunk + 1) * job->each : job->count;
    for (int64_t i = chunk * job->each; i < end; i += LANES) {
        const lanes more = load(job->more + i);
        store(job->out + i, load(job->given + i) + (job->factor == 1.0f ? more : narrow(more * job->factor)));
    }
}

/* ``given`` plus ``more`` times a factor, [count], a multiple of LANES. */
static void add(int64_t count, const real *given, const real *more, float factor, real *out) {
    struct adding job = {count, CHUNK, given, more, factor, out};
    share(chunks_of(count, job.each), add_some, &job);
}

/* Run a layer on rows [rows, hidden]. Returns 1 if out of memory. */
static int run_layer(const struct layer *own, const struct batch *batch, const struct forward_room *room,
                     const struct rows *view, int64_t hidden, const real *given, real *result) {
    const int64_t rows = view->rows, inner = own->down.inputs;
    norm_rows(&own->before, rows, hidden, given, hidden, room->state, hidden);
    if (multiply(&own->joined, rows, room->state, room->joined)) return 1;
    if (attend_layer(own, batch, room, view)) return 1;
    if (multiply(&own->output, rows, room->attended, room->added)) return 1;
    if (own->after.kind) norm_rows(&own->after, rows, hidden, room->added, hidden, room->added, hidden);
    add(rows * hidden, given, room->added, own->residual, result);
    norm_rows(&own->between, rows, hidden, own->parallel ? given : result, hidden, room->state, hidden);
    if (multiply(&own->gates, rows, room->state, room->both)) return 1;
    activate(own->activation, own->gated, rows, inner, room->both, room->inner);
    if (multiply(&own->down, rows, room->inner, room->added)) return 1;
    if (own->last.kind) norm_rows(&own->last, rows, hidden, room->added, hidden, room->added, hidden);
    add(rows * hidden, result, room->added, own->residual, result);
    return 0;
}

/* The inputs of the first layer. */
static void embed(const struct decoder *model, const struct batch *batch, int64_t rows, real *out) {
    const int64_t hidden = model->hidden;
    for (int64_t row = 0; row < rows; row++) {
        const real *const from =
            batch->inputs ? batch->inputs + row * hidden : model->embeddings + (int64_t)batch->tokens[row] * hidden;
        if (batch->inputs || model->embedding == 1.0f) memcpy(out + row * hidden, from, hidden * sizeof(real));
        else
            for (int64_t i = 0; i < hidden; i += LANES)
                store(out + row * hidden + i, load(from + i) * model->embedding);
    }
}

/* Scale a row of logits, and bend it below the cap. */
static void bend_logits(const struct decoder *model, real *row) {
    for (int64_t next = 0; next < model->head.outputs; next += LANES) {
        const int64_t left = model->head.outputs - next < LANES ? model->head.outputs - next : LANES;
        real some[LANES] = {0};
        memcpy(some, row + next, left * sizeof(real));
        lanes value = narrow(load(some) * model->logit);
        if (model->cap) value = narrow(bent(narrow(value / model->cap))) * model->cap;
        store(some, value);
        memcpy(row + next, some, left * sizeof(real));
    }
}

/* The logits of the rows that are read. Returns 1 if out of memory. */
static int read_rows(const struct decoder *model, const struct batch *batch, const struct forward_room *room,
                     const real *last) {
    const int64_t hidden = model->hidden, count = batch->read, outputs = model->head.outputs;
    real *const picked = outputs ? room->picked : room->logits;
    for (int64_t i = 0; i < count; i++) {
        const real *const row = last + batch->rows[i] * hidden;
        if (model->norm.kind) norm_row(&model->norm, hidden, row, picked + i * hidden);
        else memcpy(picked + i * hidden, row, hidden * sizeof(real));
    }
    if (!outputs || !count) return 0;
    if (multiply(&model->head, count, picked, room->logits)) return 1;
    if (model->logit == 1.0f && !model->cap) return 0;
    for (int64_t row = 0; row < count; row++) bend_logits(model, room->logits + row * outputs);
    return 0;
}

/* Run a model on a batch. Returns 1 if out of memory. */
int forward(const struct decoder *model, const struct batch *batch, const struct forward_room *room) {
    const int64_t rows = batch->begin[batch->sequences];
    struct rows views[model->views];
    survey_batch(model, batch, room, views);
    real *given = room->states[0];
    embed(model, batch, rows, given);
    for (int i = 0; i < model->layers; i++) {
        const struct layer *const own = model->layer + i;
        real *const result = room->states[i + 1];
        if (run_layer(own, batch, room, views + own->view, model->hidden, given, result)) return 1;
        given = result;
    }
    if (room->normed)
        norm_rows(&model->norm, rows, model->hidden, given, model->hidden, room->normed, model->hidden);
    return read_rows(model, batch, room, given);
}
