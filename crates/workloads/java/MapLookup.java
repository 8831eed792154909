// Lookups of random keys in a large HashMap: pointer chasing through the heap of a Java virtual machine.
//
// Usage: MapLookup ENTRIES SECONDS [--duty PERCENT] [--report SECONDS]
//
//   ENTRIES            entries of the map; one takes about 100 bytes of heap
//   SECONDS            how long to run, counted from the end of the filling
//   --duty PERCENT     CPU time used, in percent of one CPU (default 100)
//   --report SECONDS   print a line with lookups per second this often
//
// One unit of work is one lookup. The number of lookups done is published as the progress of this process, in the
// layout of crates/progress/src/layout.rs (version 1); where this is not possible, the program says so and runs all
// the same. The sum of the values found is printed at the end, so that no lookup can be optimised away.

import java.io.IOException;
import java.lang.invoke.VarHandle;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.nio.ByteOrder;
import java.nio.MappedByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.HashMap;

public final class MapLookup {
    private static final int BATCH = 1024;
    private static final long NANOSECONDS = 1_000_000_000L;
    // Shorter sleeps are dominated by the cost of waking up.
    private static final long SLEEP_MIN_NS = 2_000_000L;

    private static final int SLOT_OFFSET = 128;
    private static final int FILE_SIZE = 4096;

    private static volatile boolean stopped = false;

    public static void main(String[] arguments) throws Exception {
        if (arguments.length < 2) {
            usage("ENTRIES and SECONDS are missing");
        }
        int entries = (int) number(arguments[0], 1, 1 << 29);
        long seconds = number(arguments[1], 1, 1_000_000);
        long duty = 100;
        long reportSeconds = 0;
        for (int i = 2; i < arguments.length; i += 2) {
            if (i + 1 == arguments.length) {
                usage(arguments[i] + " needs a value");
            }
            switch (arguments[i]) {
                case "--duty":
                    duty = number(arguments[i + 1], 1, 100);
                    break;
                case "--report":
                    reportSeconds = number(arguments[i + 1], 1, 1_000_000);
                    break;
                default:
                    usage("unknown option " + arguments[i]);
            }
        }

        Thread worker = Thread.currentThread();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            stopped = true;
            try {
                // The virtual machine halts when the hooks are done: leave the worker time for its last line.
                worker.join(5000);
            } catch (InterruptedException interrupted) {
                Thread.currentThread().interrupt();
            }
        }));

        HashMap<Long, Long> map = new HashMap<>(entries * 2);
        for (int i = 0; i < entries; i++) {
            map.put(scatter(i), (long) i);
        }
        Path file = progressFile();
        MappedByteBuffer progress = null;
        try {
            progress = publish(file);
        } catch (IOException refused) {
            System.err.println("MapLookup: progress is not published: " + refused);
        }
        System.out.println("ready pid=" + ProcessHandle.current().pid() + " entries=" + entries);
        try {
            run(map, entries, seconds, duty, reportSeconds, progress);
        } finally {
            if (progress != null) {
                Files.deleteIfExists(file);
            }
        }
    }

    private static void run(HashMap<Long, Long> map, int entries, long seconds, long duty, long reportSeconds,
            MappedByteBuffer progress) throws InterruptedException {
        ThreadMXBean threads = ManagementFactory.getThreadMXBean();
        long begin = System.nanoTime();
        long end = begin + seconds * NANOSECONDS;
        long lookups = 0;
        long reportedLookups = 0;
        long reportedAt = begin;
        long checksum = 0;
        long random = 0x9E3779B97F4A7C15L;
        long owedSleep = 0;
        long cpuBefore = threads.getCurrentThreadCpuTime();
        long now = begin;
        while (!stopped && now < end) {
            for (int i = 0; i < BATCH; i++) {
                random ^= random << 13;
                random ^= random >>> 7;
                random ^= random << 17;
                long index = Long.remainderUnsigned(random, entries);
                checksum += map.get(scatter(index));
            }
            lookups += BATCH;
            if (progress != null) {
                // An aligned store of eight bytes: no reader sees half of it.
                progress.putLong(SLOT_OFFSET, lookups);
            }
            if (duty < 100) {
                long cpu = threads.getCurrentThreadCpuTime();
                owedSleep += (cpu - cpuBefore) * (100 - duty) / duty;
                cpuBefore = cpu;
                if (owedSleep >= SLEEP_MIN_NS) {
                    long before = System.nanoTime();
                    Thread.sleep(owedSleep / 1_000_000L, (int) (owedSleep % 1_000_000L));
                    owedSleep -= System.nanoTime() - before;
                }
            }
            now = System.nanoTime();
            if (reportSeconds > 0 && now - reportedAt >= reportSeconds * NANOSECONDS) {
                double interval = (now - reportedAt) / 1e9;
                long done = lookups - reportedLookups;
                System.out.printf("report t_s=%.3f interval_s=%.6f lookups=%d lookups_per_s=%.0f%n",
                        (now - begin) / 1e9, interval, done, done / interval);
                reportedAt = now;
                reportedLookups = lookups;
            }
        }
        double elapsed = (System.nanoTime() - begin) / 1e9;
        System.out.printf("summary seconds=%.3f lookups=%d lookups_per_s=%.0f checksum=%d%n", elapsed, lookups,
                lookups / elapsed, checksum);
    }

    /** A bijection that spreads neighbouring indices over the table. */
    private static long scatter(long index) {
        return index * 0xD6E8FEB86659FD93L;
    }

    /** PID-START in the progress directory. */
    private static Path progressFile() throws IOException {
        String directory = System.getenv("HOMEOSTAT_PROGRESS_DIR");
        if (directory == null || directory.isEmpty()) {
            directory = "/run/homeostat/progress";
        }
        return Path.of(directory, ProcessHandle.current().pid() + "-" + startTicks());
    }

    /** Field 22 of the stat file; the name in parentheses may contain blanks. */
    private static long startTicks() throws IOException {
        String stat = Files.readString(Path.of("/proc/self/stat"), StandardCharsets.ISO_8859_1);
        return Long.parseLong(stat.substring(stat.lastIndexOf(')') + 2).split(" ")[19]);
    }

    private static MappedByteBuffer publish(Path file) throws IOException {
        Files.createDirectories(file.getParent());
        Files.deleteIfExists(file);
        try (FileChannel channel = FileChannel.open(file, StandardOpenOption.CREATE_NEW, StandardOpenOption.READ,
                StandardOpenOption.WRITE)) {
            MappedByteBuffer buffer = channel.map(FileChannel.MapMode.READ_WRITE, 0, FILE_SIZE);
            buffer.order(ByteOrder.nativeOrder());
            buffer.putInt(8, 1); // version
            buffer.putInt(12, 1); // slots
            buffer.putInt(16, SLOT_OFFSET);
            buffer.putInt(20, 128); // bytes from one slot to the next
            buffer.putInt(24, (int) ProcessHandle.current().pid());
            buffer.putLong(32, startTicks());
            buffer.putLong(40, (Long) Files.getAttribute(Path.of("/proc/self/ns/pid"), "unix:ino"));
            buffer.put(48, "lookup".getBytes(StandardCharsets.UTF_8));
            buffer.put(80, "MapLookup".getBytes(StandardCharsets.UTF_8));
            // Last: a file that has it is complete.
            VarHandle.releaseFence();
            buffer.put(0, "HSPROG\r\n".getBytes(StandardCharsets.UTF_8));
            return buffer;
        }
    }

    private static long number(String text, long min, long max) {
        try {
            long value = Long.parseLong(text);
            if (value >= min && value <= max) {
                return value;
            }
        } catch (NumberFormatException malformed) {
            // Told below, with the range.
        }
        usage(text + " is not a number between " + min + " and " + max);
        return 0;
    }

    private static void usage(String problem) {
        System.err.println("MapLookup: " + problem);
        System.err.println("usage: MapLookup ENTRIES SECONDS [--duty PERCENT] [--report SECONDS]");
        System.exit(2);
    }
}
