/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Progress counters that a C or C++ program publishes for homeostat.
 *
 *     #include "homeostat_progress.h"
 *
 *     struct homeostat_progress progress;
 *     homeostat_progress_open(&progress, "my-server", "request", 4);  // may fail: counting is then a no-op
 *     ...
 *     homeostat_progress_add(&progress, thread_number, 1);            // one request finished
 *     ...
 *     homeostat_progress_close(&progress);                            // removes the file
 *
 * Count finished units of useful work of equal size. Counting is one relaxed atomic addition, without a system
 * call. Give each thread a slot of its own (1 to 256 slots, 128 bytes apart). One open per process. The file is
 * PID-START in $HOMEOSTAT_PROGRESS_DIR or /run/homeostat/progress; its layout (version 1) is described in
 * src/layout.rs. Needs Linux, a compiler with GNU atomics (gcc, clang), and C99 or C++11.
 */
#ifndef HOMEOSTAT_PROGRESS_H
#define HOMEOSTAT_PROGRESS_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HOMEOSTAT_PROGRESS_HEADER 128
#define HOMEOSTAT_PROGRESS_STRIDE 128
#define HOMEOSTAT_PROGRESS_SLOTS_MAX 256

struct homeostat_progress {
    unsigned char *map; /* NULL: not published, counting does nothing */
    size_t size;
    unsigned slots;
    pid_t pid;
    char path[256];
};

/* Field 22 of /proc/self/stat; 0 when it cannot be read. */
static inline uint64_t homeostat_progress_start_ticks(void)
{
    char text[1024], *at;
    ssize_t n;
    int field, fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    at = strrchr(text, ')'); /* the name may contain blanks and parentheses */
    if (!at)
        return 0;
    at++; /* now before field 3 */
    for (field = 3; field < 22; field++) {
        at = strchr(at + 1, ' ');
        if (!at)
            return 0;
    }
    return strtoull(at, NULL, 10);
}

/* Copies text into a zeroed field of `size` bytes: cut at a UTF-8 character, without control characters. */
static inline void homeostat_progress_text(unsigned char *field, size_t size, const char *text)
{
    size_t n = 0;
    for (; *text && n + 1 < size; text++)
        if ((unsigned char)*text >= 0x20 && *text != 0x7f)
            field[n++] = (unsigned char)*text;
    if (((unsigned char)*text & 0xc0) == 0x80) { /* cut inside a character: drop its beginning too */
        while (n && (field[n - 1] & 0xc0) == 0x80)
            field[--n] = 0;
        if (n)
            field[--n] = 0;
    }
}

/* Publishes `slots` counters that start at zero. Returns 0, or a negative error number. */
static inline int homeostat_progress_open(struct homeostat_progress *p, const char *name, const char *unit,
                                          unsigned slots)
{
    const char *directory = getenv("HOMEOSTAT_PROGRESS_DIR");
    unsigned char header[HOMEOSTAT_PROGRESS_HEADER];
    uint64_t start = homeostat_progress_start_ticks(), space = 0;
    uint32_t word;
    struct stat st;
    void *map;
    int fd, n, error;

    memset(p, 0, sizeof *p);
    if (slots < 1 || slots > HOMEOSTAT_PROGRESS_SLOTS_MAX)
        return -EINVAL;
    if (!start)
        return -ENOENT;
    if (!directory || !*directory) {
        directory = "/run/homeostat/progress";
        if (geteuid() == 0) {
            mkdir("/run/homeostat", 0755);
            mkdir(directory, 0755); /* the one in which every user may publish is made by the daemon, with a limited size */
        }
    }
    n = snprintf(p->path, sizeof p->path, "%s/%ld-%llu", directory, (long)getpid(), (unsigned long long)start);
    if (n < 0 || (size_t)n >= sizeof p->path)
        return -ENAMETOOLONG;

    fd = open(p->path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0 && errno == EEXIST) { /* left by this process before it called exec */
        if (unlink(p->path) != 0)
            return -errno;
        fd = open(p->path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    }
    if (fd < 0)
        return -errno;

    p->slots = slots;
    p->pid = getpid();
    p->size = (HOMEOSTAT_PROGRESS_HEADER + (size_t)slots * HOMEOSTAT_PROGRESS_STRIDE + 4095) / 4096 * 4096;
    /* Reserve the blocks: a store into a hole of a full file system would end the program with SIGBUS. */
    error = posix_fallocate(fd, 0, (off_t)p->size);
    if (error)
        goto failed;
    map = mmap(NULL, p->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        error = errno;
        goto failed;
    }

    if (stat("/proc/self/ns/pid", &st) == 0)
        space = (uint64_t)st.st_ino;
    memset(header, 0, sizeof header);
    word = 1, memcpy(header + 8, &word, 4);
    word = slots, memcpy(header + 12, &word, 4);
    word = HOMEOSTAT_PROGRESS_HEADER, memcpy(header + 16, &word, 4);
    word = HOMEOSTAT_PROGRESS_STRIDE, memcpy(header + 20, &word, 4);
    word = (uint32_t)p->pid, memcpy(header + 24, &word, 4);
    memcpy(header + 32, &start, 8);
    memcpy(header + 40, &space, 8);
    homeostat_progress_text(header + 48, 32, unit);
    homeostat_progress_text(header + 80, 48, name);
    memcpy((unsigned char *)map + 8, header + 8, sizeof header - 8);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy(map, "HSPROG\r\n", 8); /* last: a file with the magic is complete */
    close(fd);
    p->map = (unsigned char *)map;
    return 0;

failed:
    close(fd);
    unlink(p->path);
    p->path[0] = 0;
    return -error;
}

/* Counts `n` finished units in a slot (slots beyond the last wrap round). Wait-free. */
static inline void homeostat_progress_add(struct homeostat_progress *p, unsigned slot, uint64_t n)
{
    if (p->map)
        __atomic_fetch_add(
            (uint64_t *)(void *)(p->map + HOMEOSTAT_PROGRESS_HEADER + (size_t)(slot % p->slots) * HOMEOSTAT_PROGRESS_STRIDE),
            n, __ATOMIC_RELAXED);
}

/* Withdraws the counters. In a forked child it leaves the parent's file alone. */
static inline void homeostat_progress_close(struct homeostat_progress *p)
{
    if (!p->map)
        return;
    munmap(p->map, p->size);
    p->map = NULL;
    if (getpid() == p->pid)
        unlink(p->path);
}

#endif
