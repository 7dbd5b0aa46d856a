/*
 * record.c - what the guard says about an attempt: the exit record, the leader's end, and the
 * answer to `status`.
 *
 * A status is never invented: what is not known is null, and `source` says how the rest is known.
 */
#include "guard.h"

#define TRUTH(value) ((value) ? "true" : "false")

/* A wall clock time as JSON: seconds since 1970, or null. */
static void add_time(cir_text *text, const char *name, int64_t at) {
  if (at == 0)
    cir_add(text, ",\"%s\":null", name);
  else
    cir_add(text, ",\"%s\":%lld.%03d", name, (long long)(at / 1000), (int)(at % 1000));
}

/* What is known of a target when only the source that was asked for counts. */
static cir_source source_of(const cir_state *state, const cir_target *target) {
  cir_source method = state->options.method;
  return method == CIR_AUTO || method == target->source ? target->source : CIR_UNKNOWN;
}

/* A process and its end, and what follows: the closing brace, or nothing where more is to come. */
static void add_process(cir_text *text, const cir_target *target, cir_source source,
                        const char *then) {
  static const char *const sources[] = {"unknown", "wait", "pidfd", "ptrace"};
  cir_add(text, "{\"pid\":%d,\"exe\":", (int)target->pid);
  cir_add_string(text, target->exe);
  char code[12] = "null", number[12] = "null";
  if (source != CIR_UNKNOWN && WIFSIGNALED(target->status))
    snprintf(number, sizeof number, "%d", WTERMSIG(target->status));
  else if (source != CIR_UNKNOWN)
    snprintf(code, sizeof code, "%d", WEXITSTATUS(target->status));
  cir_add(text, ",\"code\":%s,\"signal\":%s,\"source\":\"%s\"", code, number, sources[source]);
  add_time(text, "ended_at", target->ended_at);
  cir_add(text, "%s", then);
}

/* Whether a signal arrived, and the closing brace of its process. */
void cir_add_delivery(cir_text *text, int delivery) {
  const char *how = delivery == 0 ? "delivered" : "not delivered: ";
  if (delivery < 0)
    how = "uncertain: the guard was killed while it sent the signal";
  const char *why = delivery == EPERM ? "EPERM" : strerror(delivery);
  cir_add(text, ",\"delivery\":\"%s%s\"}", how, delivery > 0 ? why : "");
}

/* Everybody who was sent a TERM, the first wave first, as far as there is room. */
static void add_targets(const cir_state *state, cir_text *text) {
  uint32_t omitted = state->untracked;
  const char *comma = "";
  cir_add(text, ",\"targets\":[");
  for (int wave = CIR_FIRST; wave <= CIR_SECOND; wave++)
    for (uint32_t i = 0; i < state->count; i++) {
      const cir_target *target = &state->targets[i];
      bool room = text->size - text->used > 800;
      omitted += (int)target->wave == wave && !room;
      if ((int)target->wave != wave || !room)
        continue;
      cir_add(text, "%s", comma);
      add_process(text, target, source_of(state, target), "");
      cir_add(text, ",\"signalled\":%s,\"wave\":%d", TRUTH(target->delivery == 0), wave);
      add_time(text, "signalled_at", target->signalled_at);
      cir_add_delivery(text, target->delivery);
      comma = ",";
    }
  cir_add(text, "],\"targets_omitted\":%u", omitted);
}

/* The attempt's own status: the leader's when nothing was stopped, else the first of the first wave
 * that is not 0. */
static void add_status(const cir_state *state, cir_text *text) {
  const cir_target *chosen = NULL;
  bool unknown = false;
  for (uint32_t i = 0; i < state->count; i++) {
    const cir_target *target = &state->targets[i];
    bool first = target->wave == CIR_FIRST, known = source_of(state, target) != CIR_UNKNOWN;
    unknown = unknown || (first && !known);
    if (first && known && (!chosen || (chosen->status == 0 && target->status != 0)))
      chosen = target;
  }
  const char *from = chosen && chosen->status == 0 && unknown ? "target: others unknown" : "target";
  if (!chosen && state->count > 0 && state->targets[0].source != CIR_UNKNOWN) {
    chosen = &state->targets[0];
    from = unknown ? "leader: targets unknown" : "leader";
  }
  if (chosen)
    cir_add(text, ",\"status\":%d,\"status_source\":\"%s\"",
            WIFSIGNALED(chosen->status) ? 128 + WTERMSIG(chosen->status)
                                        : WEXITSTATUS(chosen->status),
            from);
  else
    cir_add(text, ",\"status\":null,\"status_source\":\"unknown\"");
}

/* Everything else known about the attempt, as further fields. */
void cir_describe(const cir_state *state, cir_text *text) {
  cir_add(text, ",\"boot_id\":");
  cir_add_string(text, state->boot_id);
  add_time(text, "started_at", state->started_at);
  cir_add(text, ",\"leader\":%s", state->count > 0 ? "" : "null");
  if (state->count > 0)
    add_process(text, &state->targets[0], state->targets[0].source, "}");
  cir_add(text, ",\"stopped\":%s,\"reason\":", TRUTH(state->stop_at != 0));
  cir_add_string(text, state->reason);
  add_time(text, "stopped_at", state->stop_at);
  cir_add(text, ",\"killed\":%u,\"log_bytes\":%lld,\"log_first\":%lld,\"dropped_bytes\":%llu",
          state->killed, (long long)state->log_size, (long long)state->log_first,
          (unsigned long long)state->dropped);
  cir_add(text, ",\"takeovers\":%u,\"adopted\":%s,\"outside_holders\":[", state->takeovers,
          TRUTH(state->adopted));
  for (uint32_t i = 0; i < state->outside_count; i++)
    cir_add(text, "%s%d", i ? "," : "", (int)state->outside[i]);
  cir_add(text, "],\"error\":");
  cir_add_string(text, state->error);
  add_targets(state, text);
}

/* Write the exit record. 0, or -1 with errno. */
int cir_record_write(const cir_state *state) {
  static char data[CIR_RECORD_SIZE];
  cir_text text = {data, sizeof data, 0};
  cir_add(&text, "{\"version\":1");
  add_status(state, &text);
  add_time(&text, "ended_at", cir_wall());
  cir_describe(state, &text);
  cir_add(&text, "}\n");
  return cir_replace("exit.new", "exit", &text);
}

/* Announce the leader's end while others of its tree go on. Best effort: the record will say it
 * too. */
void cir_announce(cir_state *state) {
  char data[400];
  cir_text text = {data, sizeof data, 0};
  if (state->announced || state->count == 0 || !state->targets[0].ended_at)
    return;
  add_process(&text, &state->targets[0], state->targets[0].source, "}\n");
  if (cir_replace("leader.new", "leader", &text) != 0)
    unlink("leader.new");
  state->announced = true; /* only now: a guard that is killed before it leaves this to its heir */
}
