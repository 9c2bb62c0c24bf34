/* Preloaded into the ranks of tests: lets the N-th write into a folder fail, as a disk would.

   Counted are the calls that change files whose path holds `failing_part`: opening for writing, write, sync, truncation,
   rename, mkdir, chmod. Nothing is counted or changed before `fail_write` was called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static const char *failing_part;
static int counted, failing_number, failing_errno;
static char failed[PATH_MAX + 32];

/* Count from now on; write number `number` (from 1; 0 for none) fails with `error`. A null `part` ends it. */
void fail_write(const char *part, int number, int error) {
    failing_part = part;
    counted = 0;
    failing_number = number;
    failing_errno = error;
    failed[0] = 0;
}
int counted_writes(void) { return counted; }
const char *failed_write(void) { return failed; }

static int fails(const char *call, const char *path) {
    const char *part = failing_part;
    if (!part || !path || !strstr(path, part)) return 0;
    if (__sync_add_and_fetch(&counted, 1) != failing_number) return 0;
    snprintf(failed, sizeof failed, "%s %s", call, path);
    errno = failing_errno;
    return 1;
}

static int fails_at(const char *call, int fd) {
    char link[64], path[PATH_MAX];
    if (!failing_part) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(call, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))
#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...) {                          \
        va_list list;                                                     \
        va_start(list, flags);                                            \
        mode_t mode = va_arg(list, mode_t);                               \
        va_end(list);                                                     \
        if (WRITES(flags) && fails("open", path)) return -1;              \
        return NEXT(name)(path, flags, mode);                             \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                                      \
    int name(int folder, const char *path, int flags, ...) {              \
        va_list list;                                                     \
        va_start(list, flags);                                            \
        mode_t mode = va_arg(list, mode_t);                               \
        va_end(list);                                                     \
        if (WRITES(flags) && fails("open", path)) return -1;              \
        return NEXT(name)(folder, path, flags, mode);                     \
    }
OPENAT(openat)
OPENAT(openat64)
#define FOPEN(name)                                                       \
    FILE *name(const char *path, const char *mode) {                      \
        if (mode[0] != 'r' && fails("open", path)) return NULL;           \
        return NEXT(name)(path, mode);                                    \
    }
FOPEN(fopen)
FOPEN(fopen64)
#define OF_FD(type, name, parameters, arguments)                          \
    type name parameters {                                                \
        if (fails_at(#name, fd)) return -1;                               \
        return NEXT(name) arguments;                                      \
    }
OF_FD(ssize_t, write, (int fd, const void *bytes, size_t size), (fd, bytes, size))
OF_FD(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
OF_FD(ssize_t, pwrite, (int fd, const void *bytes, size_t size, off_t at), (fd, bytes, size, at))
OF_FD(ssize_t, pwrite64, (int fd, const void *bytes, size_t size, off64_t at), (fd, bytes, size, at))
OF_FD(int, fsync, (int fd), (fd))
OF_FD(int, fdatasync, (int fd), (fd))
OF_FD(int, ftruncate, (int fd, off_t size), (fd, size))
OF_FD(int, ftruncate64, (int fd, off64_t size), (fd, size))
OF_FD(int, fchmod, (int fd, mode_t mode), (fd, mode))
ssize_t sendfile(int fd, int from, off_t *at, size_t size) {
    if (fails_at("sendfile", fd)) return -1;
    return ((ssize_t(*)(int, int, off_t *, size_t))dlsym(RTLD_NEXT, "sendfile"))(fd, from, at, size);
}
ssize_t sendfile64(int fd, int from, off64_t *at, size_t size) {
    if (fails_at("sendfile", fd)) return -1;
    return ((ssize_t(*)(int, int, off64_t *, size_t))dlsym(RTLD_NEXT, "sendfile64"))(fd, from, at, size);
}
int mkdir(const char *path, mode_t mode) { return fails("mkdir", path) ? -1 : NEXT(mkdir)(path, mode); }
int chmod(const char *path, mode_t mode) { return fails("chmod", path) ? -1 : NEXT(chmod)(path, mode); }
int rename(const char *from, const char *to) { return fails("rename", from) ? -1 : NEXT(rename)(from, to); }
