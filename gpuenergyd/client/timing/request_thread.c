/* Thread that sends a rank's clock requests when the GPU reaches them, without the interpreter's lock.

   Compiled by compiled_thread.py, which defines the constants of request_memory.py. The thread has a mapping of its
   own, which it keeps until it ends, so that the end of the interpreter cannot take it away. */

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void send_request(char *memory, volatile uint32_t *words, uint32_t number) {
    char *slot = memory + SLOTS_OFFSET + (number % NUM_SLOTS) * SLOT_BYTES;
    uint32_t length;
    uint64_t later_delay_ns, instants[2];
    memcpy(&length, slot, sizeof length);
    memcpy(&later_delay_ns, slot + 8, sizeof later_delay_ns);
    char *datagram = slot + SLOT_HEAD_BYTES;
    instants[1] = now_ns();
    instants[0] = later_delay_ns ? instants[1] + later_delay_ns : 0;
    memcpy(datagram + INSTANTS_OFFSET, instants, sizeof instants);
    if (send((int)words[SOCKET], datagram, length, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK) words[IS_BROKEN] = 1;
        words[DROPPED]++;
    }
}

static void *watch(void *mapped) {
    volatile uint32_t *words = mapped;
    unsigned num_idle = 0;
    while (!words[SHALL_STOP]) {
        num_idle++;
        while (words[SENT] != words[PUT] && (int32_t)(words[REACHED] - (words[SENT] + 1)) >= 0) {
            __sync_synchronize();
            send_request(mapped, words, words[SENT] + 1);
            words[SENT]++;
            num_idle = 0;
        }
        long quiet_ns = num_idle < IDLE_AFTER_POLLS ? QUIET_POLL_NS : IDLE_POLL_NS;
        struct timespec pause = { 0, words[SENT] == words[PUT] ? quiet_ns : COMPILED_POLL_NS };
        nanosleep(&pause, 0);
    }
    if (words[SOCKET]) close((int)words[SOCKET]);
    munmap(mapped, MEMORY_BYTES);
    return 0;
}

int start(int descriptor) {
    pthread_t thread;
    void *mapped = mmap(0, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) return errno;
    int error = pthread_create(&thread, 0, watch, mapped);
    if (error) munmap(mapped, MEMORY_BYTES);
    else pthread_detach(thread);
    return error;
}
