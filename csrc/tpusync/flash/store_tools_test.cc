// What tools see in a store directory, what they call damage, and what they may change.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "tpusync/flash/flash_store.h"
#include "tpusync/flash/region.h"
#include "tpusync/flash/region_check.h"
#include "tpusync/flash/region_summary.h"
#include "tpusync/flash/store_lock.h"
#include "tpusync/flash/store_repair.h"
#include "tpusync/flash/store_view.h"
#include "tpusync/testing/sim_disk.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::flash {
namespace {

using base::Code;
using testing::count;
using testing::range;
using testing::SimDisk;
using testing::StoreCalls;
using Kind = Finding::Kind;

constexpr std::uint64_t kPageBytes = 8192;
constexpr std::uint64_t kStepBytes = 5 * kPageBytes;

class Tools : public ::testing::Test {
 protected:
  void open() { store_ = FlashStore::open(options_, disk_).value(); }
  StoreCalls calls() { return {*store_, kPageBytes}; }
  void put_and_close(std::uint64_t begin, std::uint64_t end) {
    open();
    calls().put(range(begin, end));
    store_.reset();
  }

  std::string directory() const { return path_.name_space(options_.name_space); }
  std::string base() const { return directory() + "/region-000"; }
  std::string table() const { return base() + ".table"; }
  std::string slots() const { return base() + ".slots"; }

  std::vector<Finding> check(std::optional<Digest> name_space = {}) {
    check_ = RegionCheck::open(disk_, {.base_path = base(), .name_space = name_space}).value();
    base::Result<bool> more = true;
    while (more && *more) more = check_->step(kStepBytes);
    EXPECT_TRUE(more);
    return check_->findings();
  }
  base::Result<std::size_t> repair(const std::vector<Finding>& findings) {
    const Repair repair{.base_path = base(), .findings = findings, .header = check_->reader().header()};
    return repair_region(disk_, path_, repair, 1);
  }
  void truncate(const std::string& path, std::uint64_t size_bytes) {
    ASSERT_TRUE(disk_.open(path, {}).value()->truncate(size_bytes));
  }
  StoreInfo view() { return view_store(disk_, path_).value(); }

  SimDisk disk_{{.direct_align_bytes = 512}};
  FlashOptions options_ = testing::small_options("/store", kPageBytes, 64 * kPageBytes);
  StorePath path_{options_.path};
  std::unique_ptr<FlashStore> store_;
  std::unique_ptr<RegionCheck> check_;
};

TEST_F(Tools, WholeRegionHasNoFindings) {
  put_and_close(0, 30);
  EXPECT_TRUE(check().empty());
  EXPECT_EQ(check_->progress().num_intact, 30u);
  EXPECT_EQ(check_->progress().num_bytes, 30 * kPageBytes);
  EXPECT_EQ(check_->progress().num_looked_at, check_->progress().num_slots);
}

TEST_F(Tools, EveryKindOfDamageIsFoundAndRepairedAndNothingElseIsLost) {
  put_and_close(0, 32);
  disk_.flip(slots(), 3 * kPageBytes + 17, std::byte{1});
  disk_.flip(table(), record_offset(5) + 40, std::byte{4});
  disk_.flip(table(), 20, std::byte{1});
  truncate(table(), record_offset(30) + 10);
  const auto findings = check(options_.name_space);
  std::vector<std::pair<Kind, std::uint32_t>> found;
  for (const Finding& finding : findings) found.emplace_back(finding.kind, finding.slot);
  EXPECT_EQ(found,
            (std::vector<std::pair<Kind, std::uint32_t>>{
                {Kind::kPayload, 3}, {Kind::kRecord, 5}, {Kind::kHeader, 0}, {Kind::kShortTable, 30}}));
  EXPECT_EQ(check_->progress().num_intact, 28u);
  EXPECT_EQ(repair(findings).value(), 4u);
  EXPECT_TRUE(check().empty());
  EXPECT_EQ(check_->progress().num_intact, 28u);
  open();
  EXPECT_EQ(calls().stat("recovered_entries"), 28u);
  EXPECT_EQ(count(calls().get(range(0, 32)), Code::kOk), 28u);
}

TEST_F(Tools, RecordBehindTheEndOfTheSlotFileIsDamage) {
  put_and_close(0, 16);
  truncate(slots(), 10 * kPageBytes);
  EXPECT_EQ(check().size(), 6u);
  EXPECT_EQ(repair(check_->findings()).value(), 6u);
  EXPECT_TRUE(check().empty());
}

TEST_F(Tools, SlotThatCannotBeReadIsNamed) {
  put_and_close(0, 2);
  disk_.set_faults({.path_suffix = ".slots", .read_error_1_in = 1});
  const auto findings = check();
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_EQ(findings[0].kind, Kind::kUnreadable);
}

TEST_F(Tools, RepairChangesNothingUnderAWriterAndNothingThatChangedSince) {
  put_and_close(0, 8);
  disk_.flip(slots(), 17, std::byte{1});
  const auto findings = check();
  ASSERT_EQ(findings.size(), 1u);
  open();
  const auto before = disk_.bytes(table());
  const auto refused = repair(findings);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kBusy);
  EXPECT_NE(refused.error().message.find(fmt::format("process {}", ::getpid())), std::string::npos);
  EXPECT_EQ(disk_.bytes(table()), before);
  calls().get(range(0, 8));  // drops the damaged one
  calls().put(range(0, 8));  // its slot may hold a page again
  store_.reset();
  EXPECT_EQ(repair(findings).value(), 0u);
  EXPECT_TRUE(check().empty());
}

TEST_F(Tools, WriterThatReusesSlotsIsNoDamage) {
  open();
  std::atomic<bool> done{false};
  std::jthread writer([&] {
    for (std::uint64_t next = 0; !done; next += 10) calls().put(range(next, next + 10));
  });
  std::uint64_t num_intact = 0, num_moved = 0;
  while (num_intact < 500 || num_moved == 0) {
    for (const Finding& finding : check()) ADD_FAILURE() << finding.text;
    num_intact += check_->progress().num_intact;
    num_moved += check_->progress().num_moved;
  }
  done = true;
}

TEST_F(Tools, ViewNamesRegionsWritersAndWhatIsForeign) {
  put_and_close(0, 4);
  open();
  const auto live = std::move(store_);
  options_.name_space[0] ^= std::byte{1};
  put_and_close(0, 4);
  ASSERT_TRUE(disk_.make_directory("/store/v2/deadbeef", 0700));
  ASSERT_TRUE(disk_.make_directory("/store/models", 0700));
  ASSERT_TRUE(disk_.open("/store/v1/notes.txt", {.create = true}));
  ASSERT_TRUE(disk_.open(directory() + "/region-x.table", {.create = true}));
  const StoreInfo info = view();
  EXPECT_EQ(info.other_versions, std::vector<unsigned>{2});
  EXPECT_EQ(info.strangers, std::vector<std::string>{"notes.txt"});
  ASSERT_EQ(info.namespaces.size(), 2u);
  int num_live = 0;
  for (const NamespaceInfo& name_space : info.namespaces) {
    EXPECT_EQ(name_space.json, options_.namespace_json);
    ASSERT_EQ(name_space.regions.size(), 1u);
    const RegionInfo& region = name_space.regions[0];
    num_live += region.writer_state == WriterState::kLive;
    ASSERT_TRUE(region.header && region.writer);
    EXPECT_EQ(region.header->page_bytes, kPageBytes);
    EXPECT_EQ(region.writer->process_id, static_cast<std::uint32_t>(::getpid()));
    EXPECT_EQ(region.slots_bytes % kPageBytes, 0u);
    EXPECT_GE(region.disk_bytes, region.slots_bytes + region.table_bytes);
  }
  EXPECT_EQ(num_live, 1);
  EXPECT_TRUE(info.ledger);
  EXPECT_EQ(info.used_bytes, (StoreCalls{*live, kPageBytes}.stat("bytes_on_disk")));
}

TEST_F(Tools, ViewTakesNoRegionFromAProcessThatStarts) {
  put_and_close(0, 4);
  std::atomic<bool> done{false};
  std::jthread viewer([&] {
    while (!done) view();
  });
  for (int i = 0; i < 50; ++i) {
    open();
    EXPECT_EQ(calls().stat("recovered_entries"), 4u) << "another region was taken";
    store_.reset();
  }
  done = true;
}

TEST_F(Tools, DirectoryThatStaysLockedIsViewedWithoutWriters) {
  put_and_close(0, 4);
  const auto lock = StoreLock::acquire(disk_, path_, {}).value();
  EXPECT_EQ(StoreLock::acquire(disk_, path_, {}).error().code, Code::kBusy);
  EXPECT_EQ(view().namespaces.at(0).regions.at(0).writer_state, WriterState::kUnknown);
}

TEST_F(Tools, WhatIsNoStoreIsNotMadeOne) {
  EXPECT_EQ(view_store(disk_, path_).error().code, Code::kNotFound);
  ASSERT_TRUE(disk_.make_directory("/store", 0700));
  EXPECT_FALSE(view().has_store);
  EXPECT_EQ(disk_.list("/store").value().size(), 0u);
  EXPECT_EQ(remove_orphans(disk_, path_, false).error().code, Code::kNotFound);
}

TEST_F(Tools, RegionIsRemovedUnlessItHasAWriterOrIsNewer) {
  put_and_close(0, 4);
  open();
  EXPECT_EQ(remove_region(disk_, path_, base()).error().code, Code::kBusy);
  store_.reset();
  const auto file = disk_.open(table(), {}).value();
  const TableHeader newer{.version = 2, .name_space = options_.name_space};
  const auto header = disk_.bytes(table());
  ASSERT_TRUE(os::write_bytes(*file, encode_header(newer), 0));
  EXPECT_EQ(remove_region(disk_, path_, base()).error().code, Code::kUnsupported);
  ASSERT_TRUE(os::write_bytes(*file, std::span(header).first(kHeaderBlockBytes), 0));
  EXPECT_TRUE(remove_region(disk_, path_, base()));
  EXPECT_EQ(disk_.list(directory()).value(), std::vector<std::string>{"namespace.json"});
  open();
  EXPECT_EQ(count(calls().put(range(0, 4)), Code::kOk), 4u);
}

TEST_F(Tools, OrphansGoAndRegionsStay) {
  put_and_close(0, 4);
  const std::string kept = directory();
  for (const char* name : {"/region-001.slots", "/region-002.table", "/namespace.json.tmp", "/notes.txt"})
    ASSERT_TRUE(disk_.open(kept + name, {.create = true}));
  const std::string empty = path_.version_directory() + "/" + std::string(32, 'a');
  ASSERT_TRUE(disk_.make_directory(empty, 0700));
  ASSERT_TRUE(disk_.open(empty + "/namespace.json", {.create = true}));
  const auto planned = remove_orphans(disk_, path_, true).value();
  EXPECT_EQ(planned.size(), 5u);
  EXPECT_TRUE(disk_.info(empty));
  EXPECT_EQ(remove_orphans(disk_, path_, false).value(), planned);
  EXPECT_FALSE(disk_.info(empty));
  EXPECT_EQ(disk_.list(kept).value(), (std::vector<std::string>{"namespace.json", "notes.txt",
                                                                "region-000.slots", "region-000.table"}));
  EXPECT_TRUE(remove_orphans(disk_, path_, false).value().empty());
}

TEST_F(Tools, SummaryNamesTheLargestTreesByTheirRoots) {
  open();
  calls().put(range(0, 6));
  calls().put(range(100, 103), range(0, 2));  // a branch behind page 1
  calls().put(range(200, 204));
  calls().put(range(300, 301), range(310, 315));  // its ancestors are not here
  const auto reader = RegionReader::open(disk_, {.base_path = base()}).value();
  const RegionSummary summary = summarize(*reader, 2).value();
  EXPECT_EQ(summary.num_entries, 14u);
  EXPECT_EQ(summary.num_trees, 3u);
  EXPECT_EQ(summary.num_damaged, 0u);
  ASSERT_EQ(summary.largest.size(), 2u);
  EXPECT_EQ(summary.largest[0].root, testing::key_of(0));
  EXPECT_EQ(summary.largest[0].num_pages, 9u);
  EXPECT_EQ(summary.largest[0].num_pages_longest, 6u);
  EXPECT_EQ(summary.largest[1].root, testing::key_of(200));
  EXPECT_EQ(summarize(*reader, 9).value().largest.at(2).root_depth, 5u);
}

}  // namespace
}  // namespace tpusync::flash
