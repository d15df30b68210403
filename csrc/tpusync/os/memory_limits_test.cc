#include "tpusync/os/memory_limits.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tpusync/base/bytes.h"

namespace tpusync::os {
namespace {

using base::kGiB;

// A /proc and a /sys/fs/cgroup of our own.
class MemoryLimitsTest : public ::testing::Test {
 protected:
  MemoryLimitsTest() : root_(::testing::TempDir() + "memory_limits_test/") {
    std::filesystem::remove_all(root_);
    write("proc/meminfo", "MemTotal:       100 kB\nMemAvailable:   2097152 kB\n");
  }
  ~MemoryLimitsTest() override { std::filesystem::remove_all(root_); }
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + name).parent_path());
    std::ofstream(root_ + name) << text;
  }
  MemoryLimits limits() const { return memory_limits("/", {root_ + "proc", root_ + "cgroup"}).value(); }
  std::string root_;
};

TEST_F(MemoryLimitsTest, WithoutACgroupThereIsNoLimit) {
  EXPECT_EQ(limits().host_available_bytes, 2 * kGiB);
  EXPECT_FALSE(limits().cgroup_limit_bytes);
  EXPECT_GT(limits().file_system_total_bytes, 0u);
}

TEST_F(MemoryLimitsTest, TheTightestGroupAboveCounts) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("cgroup/a/b/memory.max", "max\n");
  write("cgroup/a/memory.max", "1000000\n");
  write("cgroup/a/memory.current", "600000\n");
  write("cgroup/a/memory.stat", "anon 1\ninactive_file 200000\n");
  write("cgroup/memory.max", "5000000\n");
  EXPECT_EQ(limits().cgroup_limit_bytes, 1000000u);
  EXPECT_EQ(limits().cgroup_used_bytes, 400000u);
  write("cgroup/a/b/memory.max", "500000\n");
  write("cgroup/a/b/memory.current", "450000\n");
  EXPECT_EQ(limits().cgroup_limit_bytes, 500000u);
  EXPECT_EQ(limits().cgroup_used_bytes, 450000u);
}

TEST_F(MemoryLimitsTest, VersionOneIsReadFromItsOwnMount) {
  write("proc/self/cgroup", "9:name=systemd:/\n4:memory:/job\n0::/\n");
  write("cgroup/memory/job/memory.limit_in_bytes", "3000000\n");
  write("cgroup/memory/job/memory.usage_in_bytes", "1000000\n");
  write("cgroup/memory/job/memory.stat", "total_inactive_file 250000\n");
  write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(limits().cgroup_limit_bytes, 3000000u);
  EXPECT_EQ(limits().cgroup_used_bytes, 750000u);
}

TEST_F(MemoryLimitsTest, AMissingMeminfoIsAnError) {
  EXPECT_EQ(memory_limits("/", {root_ + "nowhere", root_}).error().code, base::Code::kIo);
  EXPECT_FALSE(memory_limits(root_ + "nowhere"));
}

}  // namespace
}  // namespace tpusync::os
