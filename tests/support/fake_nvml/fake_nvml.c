/* A libnvidia-ml.so.1 for tests: the simulated GPUs of a gpuenergyd world file, seen through NVML.
 *
 * Theory of operation. The world file (GPUENERGYD_FAKE_NVML_WORLD) is the one that gpuenergyd's own simulated GPUs live
 * in: same records, same locks, same model, written here a second time in C. So a training process that computes on
 * simulated GPUs and an unmodified NVML client see one world, a lock outlives its setter, and a SIGKILL tears nothing.
 * Beside it lies `<world>.nvml`, the control file through which a test injects faults, delays, critical errors, MIG,
 * driver reloads and a privilege rule; without it there are none. Layouts: driver/world.py and control.py.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMED_OUT = 10, VERSION_MISMATCH = 25
};

/* The world file: see plugins/gpuenergyd_sim/driver/world.py and device_model.py. */
typedef struct {
    char magic[8];
    uint32_t num_gpus, header_bytes, record_bytes, slot_bytes;
    int64_t seed;
    char boot_id[40];
} world_header;

typedef struct {
    double min_mhz, max_mhz, step_mhz, memory_mhz, knee_mhz, max_voltage, static_w, uncore_w, typical_w, idle_w,
        idle_mhz, blocking_w, min_limit_w, max_limit_w, default_limit_w, cap_ratio, leakage, warm_c, ambient_c, k_per_w,
        tau_s, energy_update_s, power_update_s, power_noise, call_median_s, call_sigma, outlier_ratio, outlier_min_s,
        outlier_max_s, settle_s, time_noise, read_s, process_list_s, stall_s, early_s, settle_spread, tail_ratio,
        tail_min_s, tail_max_s, sampled_ratio, max_q_clock_ratio, max_q_static_ratio;
} parameters;

typedef struct {
    int64_t updated_ns, locked_mhz, pending_mhz, pending_at_ns, is_working, is_occupied, shown_energy_at_ns,
        shown_power_at_ns;
    uint64_t random_state;
    int64_t num_sets, work_ended_ns, num_works_ended, last_ended_ns, before_last_ended_ns, has_next, stalled_until_ns,
        power_profiles;
    double energy_j, celsius, limit_w, work_memory_s, work_compute_s, work_w_per_mhz, work_left, shown_energy_j,
        shown_power_w, next_memory_s, next_compute_s, next_w_per_mhz, sampled_energy_j, window_energy_j;
    int64_t processes[16];
    int64_t checked_ns;
} slot;

enum { HEADER_BYTES = 256, RECORD_BYTES = 1536, PARAMETERS_AT = 160, SELECTOR_AT = 504, LOCK_DRIVER = 1, LOCK_CLIENT = 2, LOCK_GPU = 16 };
static const int SLOT_AT[2] = {512, 1024};

/* The control file: see control.py. */
enum { MAX_GPUS = 16, MAX_FAULTS = 32, MAX_XIDS = 64, MAX_HOLDERS = 32, WINDOW = 128 };
typedef struct {
    char function[64];
    int64_t gpu_index, code, after_calls, num_calls, delay_ns, num_seen, num_hit;
} fault;
typedef struct {
    int64_t privilege, epoch, num_xids;
    int64_t xids[MAX_XIDS][2];
    int64_t mig[MAX_GPUS], persistence[MAX_GPUS];
    int64_t profiles[MAX_GPUS]; /* 0: not supported; else 1 + 2 x a bit per requested workload power profile */
    int64_t memory_locks[MAX_GPUS];      /* highest memory clock in MHz, 0: no lock */
    int64_t application_clocks[MAX_GPUS]; /* SM clock in MHz, 0: the default */
    int64_t smoothing[MAX_GPUS][4];      /* power smoothing: 0 not supported, 1 off, 2 on; profile; floors in W */
    int64_t holders[MAX_HOLDERS][2]; /* pid, and a bit per GPU that the process has opened */
    fault faults[MAX_FAULTS];
} control;

typedef struct { int64_t at_ns; double energy_j; } point;

/* One H200 as it was measured (driver 580.159): what costs CPU time, and what is a value kept for 100 ms. Each row: how
 * often, and the time of a call in ms without and with load; the mean is 3.2 and 3.9 ms. */
static const struct { double share, idle_ms, loaded_ms; } ENERGY_CALLS[] = {{0.85, 2.41, 3.08}, {0.12, 5.5, 6.9}, {0.03, 16.2, 16.2}};
static const double LIMIT_CALL_S = 85e-6, PROCESS_LIST_S = 25e-6;
enum { KEPT_NS = 100000000 };

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER, driver_guard = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t kept_guard = PTHREAD_MUTEX_INITIALIZER;
static int world_fd = -1, num_inits = 0, num_gpus = 0;
static pid_t owner_pid = 0;
static char *world = NULL, world_path[4096] = "";
static control *ctl = NULL;
static int64_t my_epoch = 0;
static point history[MAX_GPUS][WINDOW];
static int history_at[MAX_GPUS];
static slot kept[MAX_GPUS]; /* what an H200 reports but for energy and limits */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void pause_ns(int64_t ns) {
    struct timespec t = {ns / 1000000000LL, ns % 1000000000LL};
    while (nanosleep(&t, &t) == -1 && errno == EINTR) {}
}

static void use_cpu(double time_s) { /* CPU time of this thread, not sleep */
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    double until_s = (double)t.tv_sec + t.tv_nsec / 1e9 + time_s;
    do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    while ((double)t.tv_sec + t.tv_nsec / 1e9 < until_s);
}

static void kernel_lock(int type, int position) {
    struct flock request = {.l_type = (short)type, .l_whence = SEEK_SET, .l_start = position, .l_len = 1, .l_pid = 0};
    while (fcntl(world_fd, F_OFD_SETLKW, &request) == -1 && errno == EINTR) {}
}

/* The model, as in device_model.py. */

static double uniform_of(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
    value ^= value >> 31;
    return ((double)(value >> 11) + 0.5) / 9007199254740992.0;
}

static double noise(uint64_t number) { /* a standard normal number that depends on a number only */
    return sqrt(-2.0 * log(uniform_of(number))) * cos(2.0 * M_PI * uniform_of(number + 1));
}

static double draw_uniform(slot *s) {
    s->random_state += 0x9E3779B97F4A7C15ULL;
    return uniform_of(s->random_state);
}

static double draw_normal(slot *s) {
    double radius = sqrt(-2.0 * log(draw_uniform(s)));
    return radius * cos(2.0 * M_PI * draw_uniform(s));
}

static double voltage(const parameters *p, double mhz) {
    double above = mhz > p->knee_mhz ? mhz - p->knee_mhz : 0.0;
    return 1.0 + (p->max_voltage - 1.0) * above / (p->max_mhz - p->knee_mhz);
}

static double work_time(const parameters *p, const slot *s, double mhz) {
    return s->work_memory_s + s->work_compute_s * p->max_mhz / mhz;
}

static double working_power(const parameters *p, const slot *s, double mhz) {
    double activity = s->work_compute_s * p->max_mhz / mhz / work_time(p, s, mhz), v = voltage(p, mhz);
    return p->static_w + (p->uncore_w + activity * s->work_w_per_mhz) * mhz * v * v;
}

static double blocking_power(const parameters *p, double mhz) {
    double v = voltage(p, mhz), at_max = p->max_mhz * p->max_voltage * p->max_voltage;
    return p->static_w + (p->blocking_w - p->static_w) * mhz * v * v / at_max;
}

static int is_busy(const slot *s) {
    return s->is_working && s->work_left > 0 && s->stalled_until_ns <= s->updated_ns;
}

static int is_max_q(const slot *s) { return (int)(s->power_profiles >> 1 & 1); }

static double profile_saves_w(const parameters *p, const slot *s) {
    return is_max_q(s) ? (1.0 - p->max_q_static_ratio) * p->static_w : 0.0;
}

static double below_profile_mhz(const parameters *p, const slot *s, int64_t locked_mhz) {
    double top = locked_mhz ? (double)locked_mhz : p->max_mhz, most = p->max_q_clock_ratio * p->max_mhz;
    return is_max_q(s) && most < top ? most : top;
}

static double ceiling_mhz(const parameters *p, const slot *s) { return below_profile_mhz(p, s, s->locked_mhz); }

static double effective_mhz(const parameters *p, const slot *s) {
    double top = ceiling_mhz(p, s);
    if (is_busy(s)) {
        double allowed = s->limit_w * p->cap_ratio + profile_saves_w(p, s), low = p->min_mhz, high = top;
        if (working_power(p, s, top) <= allowed) return top;
        for (int i = 0; i < 30; i++) {
            double middle = (low + high) / 2;
            if (working_power(p, s, middle) <= allowed) low = middle; else high = middle;
        }
        return low;
    }
    if (s->is_occupied) return top;
    return top < p->idle_mhz ? top : p->idle_mhz;
}

static double reported_mhz(const parameters *p, const slot *s) {
    int is_early = s->pending_mhz != -1 && s->pending_at_ns - s->updated_ns <= p->early_s * 1e9;
    if (!is_early || (!is_busy(s) && !s->is_occupied)) return effective_mhz(p, s);
    return below_profile_mhz(p, s, s->pending_mhz);
}

static int64_t last_update(int64_t at, double period_s, int64_t any) {
    int64_t period = llround(period_s * 1e9), steps = (at - any) / period;
    if ((at - any) % period < 0) steps--;
    return any + steps * period;
}

/* A sensor that works part of the time: from when it measures for the counter's next update, and its next event. */
static int64_t window_begin(const parameters *p, const slot *s) {
    int64_t period = llround(p->energy_update_s * 1e9);
    return s->shown_energy_at_ns + period - llround(p->sampled_ratio * (double)period);
}
static int64_t next_sampling(const parameters *p, const slot *s) {
    int64_t begin = window_begin(p, s);
    return begin > s->updated_ns ? begin : s->shown_energy_at_ns + llround(p->energy_update_s * 1e9);
}

static void integrate(const parameters *p, slot *s, double mhz, int64_t until) {
    double power, reference = p->warm_c;
    if (is_busy(s)) power = working_power(p, s, mhz) - profile_saves_w(p, s);
    else if (s->is_occupied) power = blocking_power(p, mhz) - profile_saves_w(p, s);
    else { power = p->idle_w; reference = p->ambient_c + p->k_per_w * power; }
    double cold = power - p->leakage * reference, slowing = 1.0 - p->k_per_w * p->leakage;
    double target = (p->ambient_c + p->k_per_w * cold) / slowing, tau = p->tau_s / slowing, begin = s->celsius;
#define ENERGY(dt) (cold * (dt) + p->leakage * (target * (dt) + (begin - target) * tau * (1.0 - exp(-(dt) / tau))))
#define CELSIUS(dt) (target + (begin - target) * exp(-(dt) / tau))
    int64_t edge = last_update(until, p->energy_update_s, s->shown_energy_at_ns);
    if (edge > s->updated_ns) {
        double shown = s->energy_j + ENERGY((edge - s->updated_ns) / 1e9);
        if (p->sampled_ratio < 1.0)
            shown = s->sampled_energy_j += (shown - s->window_energy_j) / p->sampled_ratio;
        s->shown_energy_j = floor(shown * 1000.0) / 1000.0;
        s->shown_energy_at_ns = edge;
    }
    edge = last_update(until, p->power_update_s, s->shown_power_at_ns);
    if (edge > s->updated_ns) {
        s->shown_power_w = (cold + p->leakage * CELSIUS((edge - s->updated_ns) / 1e9)) *
                           (1.0 + p->power_noise * noise((uint64_t)edge));
        s->shown_power_at_ns = edge;
    }
    double passed = (until - s->updated_ns) / 1e9;
    s->energy_j += ENERGY(passed);
    s->celsius = CELSIUS(passed);
    if (until == window_begin(p, s)) s->window_energy_j = s->energy_j;
}

static void end_work(slot *s) {
    s->num_works_ended++;
    s->before_last_ended_ns = s->last_ended_ns;
    s->last_ended_ns = s->work_ended_ns = s->updated_ns;
    if (!s->has_next) return;
    s->work_memory_s = s->next_memory_s;
    s->work_compute_s = s->next_compute_s;
    s->work_w_per_mhz = s->next_w_per_mhz;
    s->work_left = 1.0;
    s->work_ended_ns = s->has_next = 0;
}

static void apply_pending(slot *s) {
    if (s->pending_mhz != -1 && s->pending_at_ns <= s->updated_ns) {
        s->locked_mhz = s->pending_mhz;
        s->pending_mhz = -1;
    }
}

static void advance(const parameters *p, slot *s, int64_t now) {
    while (s->updated_ns < now) {
        apply_pending(s);
        int64_t until = now;
        if (s->pending_mhz != -1 && s->pending_at_ns < until) until = s->pending_at_ns;
        if (s->stalled_until_ns > s->updated_ns && s->stalled_until_ns < until) until = s->stalled_until_ns;
        if (p->sampled_ratio < 1.0 && next_sampling(p, s) < until) until = next_sampling(p, s);
        double mhz = effective_mhz(p, s), time_s = 0;
        int busy = is_busy(s), finishing = 0;
        if (busy) {
            time_s = work_time(p, s, mhz);
            int64_t ends = s->updated_ns + (int64_t)ceil(s->work_left * time_s * 1e9);
            finishing = ends <= until;
            if (ends < until) until = ends;
        }
        integrate(p, s, mhz, until);
        if (busy) s->work_left = finishing ? 0.0 : s->work_left - (until - s->updated_ns) / 1e9 / time_s;
        s->updated_ns = until;
        if (finishing) end_work(s);
    }
    apply_pending(s);
}

/* Records and locks. */

static const parameters *parameters_of(int gpu) {
    return (const parameters *)(world + HEADER_BYTES + gpu * RECORD_BYTES + PARAMETERS_AT);
}

/* Calls to the driver follow one another on the whole host, those that only read too. */
static void driver_lock(void) {
    pthread_mutex_lock(&driver_guard);
    kernel_lock(F_WRLCK, LOCK_DRIVER);
}
static void driver_unlock(void) {
    kernel_lock(F_UNLCK, LOCK_DRIVER);
    pthread_mutex_unlock(&driver_guard);
}
static void occupy_driver(double time_s) {
    if (time_s <= 0.0) return;
    driver_lock();
    pause_ns((int64_t)(time_s * 1e9));
    driver_unlock();
}

static const char *uuid_of(int gpu) { return world + HEADER_BYTES + gpu * RECORD_BYTES; }
static const char *name_of(int gpu) { return uuid_of(gpu) + 64; }

static int64_t start_ticks(int64_t pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return -1;
    text[n] = 0;
    char *field = strrchr(text, ')');
    if (!field || field[2] == 'Z' || field[2] == 'X') return -1;
    field += 2;
    for (int i = 0; i < 19; i++) {
        field = strchr(field, ' ');
        if (!field) return -1;
        field++;
    }
    return strtoll(field, NULL, 10);
}

static void drop_dead(slot *s) {
    int kept = 0;
    s->checked_ns = s->updated_ns;
    if (!s->processes[0]) return;
    for (int i = 0; i < 16; i += 2) {
        if (s->processes[i] && start_ticks(s->processes[i]) == s->processes[i + 1]) {
            s->processes[kept] = s->processes[i];
            s->processes[kept + 1] = s->processes[i + 1];
            kept += 2;
        }
    }
    for (int i = kept; i < 16; i++) s->processes[i] = 0;
    if (!kept) s->is_occupied = s->is_working = s->has_next = 0;
}

static void begin(int gpu, slot *s) {
    pthread_mutex_lock(&guard);
    if (getpid() != owner_pid) { /* an inherited file description would not exclude our parent */
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", world_fd);
        world_fd = open(path, O_RDWR | O_CLOEXEC);
        owner_pid = getpid();
    }
    kernel_lock(F_WRLCK, LOCK_GPU + gpu);
    char *record = world + HEADER_BYTES + gpu * RECORD_BYTES;
    memcpy(s, record + SLOT_AT[record[SELECTOR_AT] & 1], sizeof *s);
    advance(parameters_of(gpu), s, now_ns());
    if (s->updated_ns - s->checked_ns >= 5000000) drop_dead(s);
    point *latest = &history[gpu][history_at[gpu]];
    if (s->updated_ns - latest->at_ns >= 20000000) {
        history_at[gpu] = (history_at[gpu] + 1) % WINDOW;
        history[gpu][history_at[gpu]] = (point){s->updated_ns, s->energy_j};
    }
}

static void end(int gpu, const slot *s) {
    char *record = world + HEADER_BYTES + gpu * RECORD_BYTES;
    int unused = 1 - (record[SELECTOR_AT] & 1);
    memcpy(record + SLOT_AT[unused], s, sizeof *s);
    __atomic_store_n(record + SELECTOR_AT, (char)unused, __ATOMIC_SEQ_CST);
    kernel_lock(F_UNLCK, LOCK_GPU + gpu);
    pthread_mutex_unlock(&guard);
}

/* Faults, privilege, handles. */

static int injected(const char *function, int gpu) {
    if (!ctl) return OK;
    for (int i = 0; i < MAX_FAULTS; i++) {
        fault *f = &ctl->faults[i];
        if (!f->function[0] || (strcmp(f->function, function) && strcmp(f->function, "*"))) continue;
        if (f->gpu_index != -1 && f->gpu_index != gpu) continue;
        int64_t seen = __atomic_add_fetch(&f->num_seen, 1, __ATOMIC_SEQ_CST);
        if (seen <= f->after_calls || (f->num_calls >= 0 && seen > f->after_calls + f->num_calls)) continue;
        __atomic_add_fetch(&f->num_hit, 1, __ATOMIC_SEQ_CST);
        if (f->delay_ns) pause_ns(f->delay_ns);
        if (f->code) return (int)f->code;
    }
    return OK;
}

static int may_change(void) {
    if (ctl && ctl->privilege) return ctl->privilege == 1;
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    unsigned long long effective = 0;
    while (status && fgets(line, sizeof line, status)) sscanf(line, "CapEff: %llx", &effective);
    if (status) fclose(status);
    return (effective >> 21) & 1;
}

static void *handle_of(int gpu) { return (void *)(uintptr_t)(0x10000 + (my_epoch & 0xFFFF) * 0x1000 + gpu * 16); }

/* Ends the process if it changes something where `FakeNvmlControl.forbid_changes` was called; other calls pass. */
int refuse_change(const char *function) {
    const char *verbs[] = {"Set", "Reset", "Clear", "Update", "Freeze", "Create", "Destroy", "Modify"};
    if (!ctl || ctl->privilege != 3 || strstr(function, "Get") || !strncmp(function, "nvmlEvent", 9)) return 3;
    for (unsigned i = 0; i < sizeof verbs / sizeof *verbs; i++)
        if (strstr(function, verbs[i])) abort();
    return 3;
}

/* Returns a GPU index for a handle, or minus the code to return. */
static int enter(const char *function, void *handle) {
    refuse_change(function);
    if (num_inits <= 0) return -UNINITIALIZED;
    if (ctl && ctl->epoch != my_epoch) return -UNINITIALIZED;
    uintptr_t offset = (uintptr_t)handle - (uintptr_t)handle_of(0);
    if (offset % 16 || offset / 16 >= (uintptr_t)num_gpus) return -INVALID_ARGUMENT;
    int gpu = (int)(offset / 16), code = injected(function, gpu);
    return code ? -code : gpu;
}

#define ENTER(handle) \
    int gpu = enter(__func__, handle); \
    if (gpu < 0) return -gpu

#define READ(handle) \
    ENTER(handle); \
    slot s; \
    begin(gpu, &s); \
    end(gpu, &s); \
    const parameters *p = parameters_of(gpu); \
    (void)p

static int is_h200(int gpu) { return strstr(name_of(gpu), "H200") != NULL; }

/* As it was, up to 100 ms ago: an H200 takes a new reading when it is asked and the last one is that old. */
static void read_kept(int gpu, slot *s) {
    int is_kept = is_h200(gpu);
    pthread_mutex_lock(&kept_guard);
    if (is_kept && kept[gpu].updated_ns && now_ns() - kept[gpu].updated_ns < KEPT_NS) *s = kept[gpu];
    else {
        begin(gpu, s);
        end(gpu, s);
        if (is_kept) kept[gpu] = *s;
    }
    pthread_mutex_unlock(&kept_guard);
}

#define READ_KEPT(handle) \
    ENTER(handle); \
    slot s; \
    read_kept(gpu, &s); \
    const parameters *p = parameters_of(gpu); \
    (void)p

/* The energy counter, looked at some instant within the call. */
static double read_energy_j(int gpu) {
    slot s;
    begin(gpu, &s);
    double which = draw_uniform(&s), at = draw_uniform(&s), time_s = 0.0;
    int row = 0;
    while (row < 2 && which >= ENERGY_CALLS[row].share) which -= ENERGY_CALLS[row++].share;
    if (is_h200(gpu)) time_s = (is_busy(&s) ? ENERGY_CALLS[row].loaded_ms : ENERGY_CALLS[row].idle_ms) / 1000.0;
    end(gpu, &s);
    if (time_s == 0.0) return s.shown_energy_j;
    use_cpu(at * time_s);
    begin(gpu, &s);
    end(gpu, &s);
    use_cpu((1.0 - at) * time_s);
    return s.shown_energy_j;
}

static int supported_clocks(const parameters *p, unsigned *out) {
    int steps = (int)llround((p->max_mhz - p->min_mhz) / p->step_mhz);
    for (int k = 0; out && k <= steps; k++) out[steps - k] = (unsigned)floor(p->min_mhz + k * p->step_mhz);
    return steps + 1;
}

/* Library. */

/* Every process that has the library open holds LOCK_CLIENT shared; the kernel drops it when the process dies. Who gets it
 * alone is the first client since the last one left: without persistence mode the driver was unloaded in between. */
static void hold_driver(void) {
    struct flock request = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCK_CLIENT, .l_len = 1, .l_pid = 0};
    if (fcntl(world_fd, F_OFD_SETLK, &request) == 0 && ctl)
        for (int gpu = 0; gpu < num_gpus; gpu++) {
            if (ctl->persistence[gpu]) continue;
            slot s;
            pthread_mutex_unlock(&guard);
            begin(gpu, &s);
            s.locked_mhz = 0;
            s.pending_mhz = -1;
            s.power_profiles = 0;
            s.limit_w = parameters_of(gpu)->default_limit_w;
            end(gpu, &s);
            pthread_mutex_lock(&guard);
        }
    kernel_lock(F_RDLCK, LOCK_CLIENT);
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&guard);
    int code = OK;
    const char *path = getenv("GPUENERGYD_FAKE_NVML_WORLD");
    if (!world || (!num_inits && path && strcmp(path, world_path))) { /* an old mapping stays: a thread may be in it */
        struct stat status;
        world_fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
        if (world_fd < 0 || fstat(world_fd, &status) || status.st_size < HEADER_BYTES) code = DRIVER_NOT_LOADED;
        world = NULL;
        ctl = NULL;
        if (code == OK) {
            snprintf(world_path, sizeof world_path, "%s", path);
            world = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, world_fd, 0);
            const world_header *header = (const world_header *)world;
            num_gpus = (int)header->num_gpus;
            owner_pid = getpid();
            if (memcmp(header->magic, "GPUEWLD2", 8) || header->record_bytes != RECORD_BYTES ||
                header->slot_bytes != sizeof(slot) || num_gpus > MAX_GPUS)
                abort(); /* the layout changed and this file did not */
            char control_path[4200];
            snprintf(control_path, sizeof control_path, "%s.nvml", path);
            int fd = open(control_path, O_RDWR | O_CLOEXEC);
            if (fd >= 0) ctl = mmap(NULL, sizeof *ctl, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        }
    }
    if (code == OK) code = injected("nvmlInitWithFlags", -1);
    if (code == OK) {
        if (!num_inits) hold_driver();
        num_inits++;
        my_epoch = ctl ? ctl->epoch : 0;
    }
    pthread_mutex_unlock(&guard);
    return code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }

/* Who has opened which GPU, as the driver knows it: a GPU that is open cannot be reset. */
static void hold(int gpu) {
    if (!ctl) return;
    for (int i = 0; i < MAX_HOLDERS; i++) {
        int64_t pid = ctl->holders[i][0];
        if (pid && pid != getpid() && !(kill((pid_t)pid, 0) && errno == ESRCH)) continue;
        if (pid != getpid()) ctl->holders[i][1] = 0;
        ctl->holders[i][0] = getpid();
        ctl->holders[i][1] |= (int64_t)1 << gpu;
        return;
    }
}
static void let_go(void) {
    for (int i = 0; ctl && i < MAX_HOLDERS; i++)
        if (ctl->holders[i][0] == getpid()) ctl->holders[i][0] = ctl->holders[i][1] = 0;
}

int nvmlShutdown(void) {
    pthread_mutex_lock(&guard);
    if (num_inits == 1) let_go();
    int code = num_inits > 0 ? OK : UNINITIALIZED;
    if (num_inits > 0 && !--num_inits) kernel_lock(F_UNLCK, LOCK_CLIENT);
    pthread_mutex_unlock(&guard);
    return code;
}

const char *nvmlErrorString(int code) { return code ? "error of the fake driver" : "Success"; }

static int copy(char *out, unsigned size, const char *text) {
    if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) { return copy(out, size, "599.00.00"); }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { return copy(out, size, "13.599.00"); }
int nvmlSystemGetCudaDriverVersion(int *out) { *out = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return OK; }
int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
    char path[64], name[256] = "";
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "r");
    if (!file) return NOT_FOUND;
    if (fgets(name, sizeof name, file)) name[strcspn(name, "\n")] = 0;
    fclose(file);
    return copy(out, size, name);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (num_inits <= 0 || (ctl && ctl->epoch != my_epoch)) return UNINITIALIZED;
    *count = (unsigned)num_gpus;
    return injected(__func__, -1);
}
int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    if (num_inits <= 0 || (ctl && ctl->epoch != my_epoch)) return UNINITIALIZED;
    if (index >= (unsigned)num_gpus) return INVALID_ARGUMENT;
    *out = handle_of((int)index);
    hold((int)index);
    return injected(__func__, (int)index);
}
int nvmlDeviceGetHandleByIndex(unsigned index, void **out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    for (int gpu = 0; gpu < num_gpus; gpu++)
        if (!strcmp(uuid_of(gpu), uuid)) return nvmlDeviceGetHandleByIndex_v2((unsigned)gpu, out);
    return num_inits > 0 ? NOT_FOUND : UNINITIALIZED;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **out) {
    unsigned domain, bus;
    if (sscanf(bus_id, "%x:%x", &domain, &bus) != 2 || bus < 1) return INVALID_ARGUMENT;
    return bus > (unsigned)num_gpus ? NOT_FOUND : nvmlDeviceGetHandleByIndex_v2(bus - 1, out);
}

/* What a GPU is. */

int nvmlDeviceGetUUID(void *device, char *out, unsigned size) { ENTER(device); return copy(out, size, uuid_of(gpu)); }
int nvmlDeviceGetName(void *device, char *out, unsigned size) { ENTER(device); return copy(out, size, name_of(gpu)); }
int nvmlDeviceGetIndex(void *device, unsigned *out) { ENTER(device); *out = (unsigned)gpu; return OK; }
int nvmlDeviceGetMinorNumber(void *device, unsigned *out) { ENTER(device); *out = (unsigned)gpu; return OK; }
int nvmlDeviceGetBrand(void *device, int *out) { ENTER(device); *out = 14; return OK; }
int nvmlDeviceGetArchitecture(void *device, unsigned *out) {
    ENTER(device);
    *out = strstr(name_of(gpu), "V100") ? 5 : strstr(name_of(gpu), "H") == name_of(gpu) ? 9 : 7;
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    ENTER(device);
    *major = strstr(name_of(gpu), "V100") ? 7 : strstr(name_of(gpu), "H") == name_of(gpu) ? 9 : 8;
    *minor = 0;
    return OK;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} pci_info;
int nvmlDeviceGetPciInfo_v3(void *device, pci_info *out) {
    ENTER(device);
    memset(out, 0, sizeof *out);
    snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", (gpu + 1) & 0xFF);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", (gpu + 1) & 0xFF);
    out->bus = (unsigned)gpu + 1;
    return OK;
}
int nvmlDeviceGetPciInfo_v2(void *device, pci_info *out) { return nvmlDeviceGetPciInfo_v3(device, out); }

/* Reading. */

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *out) {
    ENTER(device);
    *out = (unsigned long long)llround(read_energy_j(gpu) * 1000.0);
    return OK;
}

static double average_power(int gpu, const slot *s) {
    for (int back = WINDOW - 1; back > 0; back--) { /* from the oldest kept point to the newest */
        point *old = &history[gpu][(history_at[gpu] + WINDOW - back) % WINDOW];
        if (old->at_ns && s->updated_ns - old->at_ns <= 1050000000LL && s->updated_ns - old->at_ns > 100000000LL)
            return (s->energy_j - old->energy_j) / ((s->updated_ns - old->at_ns) / 1e9);
    }
    return s->shown_power_w;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *out) {
    READ_KEPT(device);
    int is_instant = strstr(name_of(gpu), "V100") || strstr(name_of(gpu), "A100");
    *out = (unsigned)lround((is_instant ? s.shown_power_w : average_power(gpu, &s)) * 1000.0);
    return OK;
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    unsigned value_type;
    int code;
    union { double d; unsigned u; unsigned long long ull; } value;
} field_value;
int nvmlDeviceGetFieldValues(void *device, int count, field_value *values) { /* the one slow call of a reading */
    ENTER(device);
    const parameters *p = parameters_of(gpu);
    if (!is_h200(gpu)) occupy_driver(p->read_s);
    slot s;
    read_kept(gpu, &s);
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    for (int i = 0; i < count; i++) {
        field_value *v = &values[i];
        char name[64];
        snprintf(name, sizeof name, "field_%u", v->field);
        v->timestamp = (long long)wall.tv_sec * 1000000 + wall.tv_nsec / 1000;
        v->latency_us = 20;
        v->value_type = 1;
        v->value.ull = 0;
        v->code = injected(name, gpu);
        if (v->code) continue;
        switch (v->field) {
        case 83: case 191:
            v->value_type = 3;
            v->value.ull = (unsigned long long)llround(read_energy_j(gpu) * 1000.0);
            break;
        case 82: v->code = NOT_SUPPORTED; break;
        case 185: v->value.u = (unsigned)lround(average_power(gpu, &s) * 1000.0); break;
        case 186: v->value.u = (unsigned)lround(s.shown_power_w * 1000.0); break;
        case 187: v->value.u = (unsigned)lround(p->min_limit_w * 1000.0); break;
        case 188: v->value.u = (unsigned)lround(p->max_limit_w * 1000.0); break;
        case 189: v->value.u = (unsigned)lround(p->default_limit_w * 1000.0); break;
        case 190: case 192: v->value.u = (unsigned)lround(s.limit_w * 1000.0); break;
        case 251: case 264: case 255: case 276:
            if (!ctl || !ctl->smoothing[gpu][0]) v->code = NOT_SUPPORTED;
            else if (v->field == 251) v->value.u = ctl->smoothing[gpu][0] == 2;
            else v->value.u = (unsigned)ctl->smoothing[gpu][v->field == 264 ? 1 : v->field == 255 ? 2 : 3];
            break;
        default: v->code = NOT_SUPPORTED;
        }
    }
    return OK;
}

int nvmlDeviceGetClockInfo(void *device, int domain, unsigned *out) {
    READ_KEPT(device);
    if (domain < 0 || domain > 3) return INVALID_ARGUMENT;
    *out = (unsigned)lround(domain == 2 ? p->memory_mhz : reported_mhz(p, &s));
    if (domain == 2 && ctl && ctl->memory_locks[gpu] && ctl->memory_locks[gpu] < *out) *out = (unsigned)ctl->memory_locks[gpu];
    return OK;
}
int nvmlDeviceGetMaxClockInfo(void *device, int domain, unsigned *out) {
    READ(device);
    *out = (unsigned)lround(domain == 2 ? p->memory_mhz : p->max_mhz);
    return OK;
}
int nvmlDeviceGetClock(void *device, int domain, int id, unsigned *out) {
    return id == 0 ? nvmlDeviceGetClockInfo(device, domain, out) : nvmlDeviceGetMaxClockInfo(device, domain, out);
}
/* Application clocks are at the maximum unless a test has set them; they have no effect. Setting is not supported. */
int nvmlDeviceGetApplicationsClock(void *device, int domain, unsigned *out) {
    READ(device);
    if (domain < 0 || domain > 2) return INVALID_ARGUMENT;
    *out = (unsigned)lround(domain == 2 ? p->memory_mhz : p->max_mhz);
    if (domain != 2 && ctl && ctl->application_clocks[gpu]) *out = (unsigned)ctl->application_clocks[gpu];
    return OK;
}
int nvmlDeviceGetDefaultApplicationsClock(void *device, int domain, unsigned *out) {
    return nvmlDeviceGetApplicationsClock(device, domain, out);
}
int nvmlDeviceGetSupportedMemoryClocks(void *device, unsigned *count, unsigned *out) {
    READ(device);
    if (!out || *count < 1) { *count = 1; return INSUFFICIENT_SIZE; }
    *count = 1;
    out[0] = (unsigned)lround(p->memory_mhz);
    return OK;
}
int nvmlDeviceGetSupportedGraphicsClocks(void *device, unsigned memory_mhz, unsigned *count, unsigned *out) {
    READ(device);
    if (memory_mhz != (unsigned)lround(p->memory_mhz)) return NOT_FOUND;
    unsigned needed = (unsigned)supported_clocks(p, NULL);
    if (!out || *count < needed) { *count = needed; return INSUFFICIENT_SIZE; }
    *count = needed;
    supported_clocks(p, out);
    return OK;
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *out) {
    READ_KEPT(device);
    if (sensor != 0) return INVALID_ARGUMENT;
    *out = (unsigned)lround(s.celsius);
    return OK;
}
typedef struct { unsigned version, sensor; int celsius; } temperature_v1;
int nvmlDeviceGetTemperatureV(void *device, temperature_v1 *out) {
    READ_KEPT(device);
    if (out->version != 0x100000C) return VERSION_MISMATCH;
    out->celsius = (int)lround(s.celsius);
    return OK;
}
static unsigned long long event_reasons(const parameters *p, const slot *s) {
    return !is_busy(s) ? (s->is_occupied ? 0 : 1) : effective_mhz(p, s) < ceiling_mhz(p, s) ? 4 : 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *out) {
    READ_KEPT(device);
    *out = event_reasons(p, &s);
    return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *out) {
    READ_KEPT(device);
    *out = event_reasons(p, &s);
    return OK;
}
int nvmlDeviceGetPerformanceState(void *device, int *out) { READ_KEPT(device); *out = s.is_occupied ? 0 : 8; return OK; }
int nvmlDeviceGetPowerState(void *device, int *out) { return nvmlDeviceGetPerformanceState(device, out); }
typedef struct { unsigned gpu, memory; } utilization;
int nvmlDeviceGetUtilizationRates(void *device, utilization *out) {
    READ(device);
    if (ctl && ctl->mig[gpu]) return NOT_SUPPORTED;
    out->gpu = is_busy(&s) || (s.last_ended_ns > 0 && s.updated_ns - s.last_ended_ns <= 100000000) ? 100 : 0;
    out->memory = is_busy(&s) ? 50 : 0;
    return OK;
}
typedef struct { unsigned long long total, free, used; } memory_v1;
int nvmlDeviceGetMemoryInfo(void *device, memory_v1 *out) {
    READ(device);
    out->total = 80ULL << 30;
    out->used = s.is_occupied ? 40ULL << 30 : 1ULL << 30;
    out->free = out->total - out->used;
    return OK;
}
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2 *out) {
    memory_v1 simple;
    int code = nvmlDeviceGetMemoryInfo(device, &simple);
    out->total = simple.total;
    out->reserved = 0;
    out->free = simple.free;
    out->used = simple.used;
    return code;
}
int nvmlDeviceGetPowerManagementMode(void *device, int *out) { READ(device); *out = 1; return OK; }
int nvmlDeviceGetPowerManagementLimit(void *device, unsigned *out) {
    READ(device);
    if (is_h200(gpu)) use_cpu(LIMIT_CALL_S);
    *out = (unsigned)lround(s.limit_w * 1000.0);
    return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *out) {
    READ(device);
    if (is_h200(gpu)) use_cpu(LIMIT_CALL_S);
    *out = (unsigned)lround(s.limit_w * 1000.0);
    return OK;
}
int nvmlDeviceGetPowerManagementDefaultLimit(void *device, unsigned *out) {
    READ(device);
    *out = (unsigned)lround(p->default_limit_w * 1000.0);
    return OK;
}
int nvmlDeviceGetPowerManagementLimitConstraints(void *device, unsigned *low, unsigned *high) {
    READ(device);
    *low = (unsigned)lround(p->min_limit_w * 1000.0);
    *high = (unsigned)lround(p->max_limit_w * 1000.0);
    return OK;
}
int nvmlDeviceGetPersistenceMode(void *device, int *out) {
    ENTER(device);
    *out = ctl ? (int)ctl->persistence[gpu] : 1;
    return OK;
}
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    ENTER(device);
    if (strstr(name_of(gpu), "V100")) return NOT_SUPPORTED;
    *current = *pending = ctl ? (unsigned)ctl->mig[gpu] : 0;
    return OK;
}
/* Workload power profiles: those of GPU models that offer them are in the world file, those that a test requests as another
 * program in the control file, which makes any GPU offer all. */
typedef struct { unsigned version, supported[8], requested[8], enforced[8]; } power_profiles;
int nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(void *device, power_profiles *out) {
    READ(device);
    int64_t foreign = ctl ? ctl->profiles[gpu] : 0;
    if (p->max_q_clock_ratio == 1.0 && !foreign) return NOT_SUPPORTED;
    for (int i = 0; i < 8; i++) out->supported[i] = out->requested[i] = out->enforced[i] = 0;
    out->supported[0] = foreign ? (1u << 25) - 1 : 3;
    out->requested[0] = (unsigned)(foreign >> 1 | s.power_profiles);
    out->enforced[0] = out->requested[0] & -out->requested[0]; /* profiles conflict: the first one wins */
    return OK;
}
int nvmlDeviceGetComputeMode(void *device, int *out) { ENTER(device); *out = 0; return OK; }
int nvmlDeviceGetDisplayActive(void *device, int *out) { ENTER(device); *out = 0; return OK; }
int nvmlDeviceGetDisplayMode(void *device, int *out) { ENTER(device); *out = 0; return OK; }

typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } process;
static int processes(void *device, const char *function, unsigned *count, process *out) {
    int gpu = enter(function, device);
    if (gpu < 0) return -gpu;
    slot s;
    unsigned found = 0;
    if (is_h200(gpu)) use_cpu(PROCESS_LIST_S);
    else occupy_driver(parameters_of(gpu)->process_list_s);
    begin(gpu, &s);
    drop_dead(&s);
    end(gpu, &s);
    for (int i = 0; i < 16; i += 2) found += s.processes[i] != 0;
    if (found && (!out || *count < found)) { *count = found; return INSUFFICIENT_SIZE; }
    *count = 0;
    for (int i = 0; i < 16; i += 2)
        if (s.processes[i]) out[(*count)++] = (process){(unsigned)s.processes[i], 1ULL << 30, 0xFFFFFFFF, 0xFFFFFFFF};
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process *out) {
    return processes(device, __func__, count, out);
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned *count, process *out) {
    return processes(device, __func__, count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, process *out) {
    ENTER(device);
    (void)out;
    *count = 0;
    return OK;
}
int nvmlDeviceGetGraphicsRunningProcesses_v2(void *device, unsigned *count, process *out) {
    return nvmlDeviceGetGraphicsRunningProcesses_v3(device, count, out);
}

/* Changing: one call after another on the whole host, each as slow as the model says. */

static void driver_begin(int gpu, int64_t mhz, int64_t *settle_ns) {
    driver_lock();
    const parameters *p = parameters_of(gpu);
    slot s;
    begin(gpu, &s);
    double latency_s, settle_s;
    if (draw_uniform(&s) < p->outlier_ratio)
        latency_s = p->outlier_min_s + (p->outlier_max_s - p->outlier_min_s) * draw_uniform(&s);
    else
        latency_s = p->call_median_s * exp(p->call_sigma * draw_normal(&s));
    if (draw_uniform(&s) < p->tail_ratio)
        settle_s = p->tail_min_s + (p->tail_max_s - p->tail_min_s) * draw_uniform(&s);
    else /* each target clock has its own median */
        settle_s = -p->settle_s * exp(p->settle_spread * noise(0x9E3779B97F4A7C15ULL * (uint64_t)(mhz + 1))) *
                   log(draw_uniform(&s));
    end(gpu, &s);
    pause_ns((int64_t)(latency_s * 1e9));
    *settle_ns = (int64_t)(settle_s * 1e9);
}

static int install(int gpu, int64_t mhz) {
    int64_t settle_ns;
    slot s;
    driver_begin(gpu, mhz, &settle_ns);
    begin(gpu, &s);
    s.stalled_until_ns = s.updated_ns + llround(parameters_of(gpu)->stall_s * 1e9);
    s.pending_mhz = mhz;
    s.pending_at_ns = s.updated_ns + settle_ns;
    s.num_sets++;
    end(gpu, &s);
    driver_unlock();
    return OK;
}

int nvmlDeviceSetGpuLockedClocks(void *device, unsigned low, unsigned high) {
    ENTER(device);
    if (!may_change()) return NO_PERMISSION;
    if (low > high) return INVALID_ARGUMENT;
    const parameters *p = parameters_of(gpu);
    unsigned clocks[512];
    int count = supported_clocks(p, clocks);
    unsigned applied = clocks[count - 1]; /* as boards do: down to the next supported clock, never below the lowest */
    for (int i = count - 1; i >= 0; i--)
        if (clocks[i] <= high) applied = clocks[i];
    return install(gpu, applied);
}
int nvmlDeviceResetGpuLockedClocks(void *device) {
    ENTER(device);
    if (!may_change()) return NO_PERMISSION;
    return install(gpu, 0);
}
int nvmlDeviceSetPowerManagementLimit(void *device, unsigned milliwatts) {
    ENTER(device);
    if (!may_change()) return NO_PERMISSION;
    const parameters *p = parameters_of(gpu);
    if (milliwatts < p->min_limit_w * 1000.0 || milliwatts > p->max_limit_w * 1000.0) return INVALID_ARGUMENT;
    int64_t settle_ns;
    slot s;
    driver_begin(gpu, 0, &settle_ns);
    begin(gpu, &s);
    s.limit_w = milliwatts / 1000.0;
    end(gpu, &s);
    driver_unlock();
    return OK;
}
static int update_profiles(int gpu, unsigned added, unsigned removed) { /* nobody is asked for privilege */
    int64_t settle_ns, foreign = ctl ? ctl->profiles[gpu] : 0;
    unsigned offered = foreign ? (1u << 25) - 1 : 3;
    if (parameters_of(gpu)->max_q_clock_ratio == 1.0 && !foreign) return NOT_SUPPORTED;
    if ((added | removed) & ~offered) return INVALID_ARGUMENT;
    slot s;
    driver_begin(gpu, 0, &settle_ns);
    begin(gpu, &s);
    s.power_profiles = (s.power_profiles | added) & ~(int64_t)removed;
    if (foreign) ctl->profiles[gpu] = foreign & ~((int64_t)removed << 1);
    end(gpu, &s);
    driver_unlock();
    return OK;
}
typedef struct { unsigned version, mask[8]; } requested_profiles;
int nvmlDeviceWorkloadPowerProfileSetRequestedProfiles(void *device, const requested_profiles *in) {
    ENTER(device);
    return in->version != 0x1000024 ? VERSION_MISMATCH : update_profiles(gpu, in->mask[0], 0);
}
int nvmlDeviceWorkloadPowerProfileClearRequestedProfiles(void *device, const requested_profiles *in) {
    ENTER(device);
    return in->version != 0x1000024 ? VERSION_MISMATCH : update_profiles(gpu, 0, in->mask[0]);
}
typedef struct { unsigned operation, mask[8]; } updated_profiles;
int nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1(void *device, const updated_profiles *in) {
    ENTER(device);
    if (in->operation > 1) return INVALID_ARGUMENT; /* overwriting the requests of others is no part of this */
    return update_profiles(gpu, in->operation ? in->mask[0] : 0, in->operation ? 0 : in->mask[0]);
}
int nvmlDeviceSetPersistenceMode(void *device, int mode) {
    ENTER(device);
    if (!may_change()) return NO_PERMISSION;
    if (ctl) ctl->persistence[gpu] = mode;
    return OK;
}
int nvmlDeviceSetMemoryLockedClocks(void *device, unsigned low, unsigned high) {
    ENTER(device);
    (void)low;
    if (strstr(name_of(gpu), "V100")) return NOT_SUPPORTED;
    if (!may_change()) return NO_PERMISSION;
    if (ctl) ctl->memory_locks[gpu] = high;
    return OK;
}
int nvmlDeviceResetMemoryLockedClocks(void *device) { return nvmlDeviceSetMemoryLockedClocks(device, 0, 0); }

/* Events: critical errors that a test appends to the control file. */

typedef struct { int64_t num_seen; uint32_t gpus; } event_set;
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event_data;

int nvmlEventSetCreate(event_set **out) {
    if (num_inits <= 0 || (ctl && ctl->epoch != my_epoch)) return UNINITIALIZED;
    *out = calloc(1, sizeof **out);
    (*out)->num_seen = ctl ? ctl->num_xids : 0;
    return injected(__func__, -1);
}
int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *out) { ENTER(device); *out = 8; return OK; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, event_set *set) {
    ENTER(device);
    if (types & 8) set->gpus |= 1u << gpu;
    return OK;
}
int nvmlEventSetWait_v2(event_set *set, event_data *out, unsigned timeout_ms) {
    int code = injected(__func__, -1);
    if (code) return code;
    int64_t deadline = now_ns() + timeout_ms * 1000000LL;
    do {
        while (ctl && set->num_seen < __atomic_load_n(&ctl->num_xids, __ATOMIC_SEQ_CST)) {
            int64_t *xid = ctl->xids[set->num_seen++ % MAX_XIDS];
            if (!(set->gpus >> xid[0] & 1)) continue;
            *out = (event_data){handle_of((int)xid[0]), 8, (unsigned long long)xid[1], 0xFFFFFFFF, 0xFFFFFFFF};
            return OK;
        }
        pause_ns(2000000);
    } while (now_ns() < deadline);
    return TIMED_OUT;
}
int nvmlEventSetWait(event_set *set, event_data *out, unsigned timeout_ms) {
    return nvmlEventSetWait_v2(set, out, timeout_ms);
}
int nvmlEventSetFree(event_set *set) { free(set); return OK; }
