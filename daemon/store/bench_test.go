package store

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	bolt "go.etcd.io/bbolt"
)

// BenchmarkCommits compares durable writes of a small value: through the writer at 1, 8 and 64
// callers, and through bbolt's own Update and Batch at 64. One operation is one acknowledged write.
func BenchmarkCommits(b *testing.B) {
	value := make([]byte, 100)
	for _, callers := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("writer/callers=%d", callers), func(b *testing.B) {
			s := newTest(b)
			spread(b, callers, func(n int64) error {
				return s.Update(context.Background(), func(tx *Tx) error {
					return tx.put(operationsBucket, numberBytes(uint64(n)), value)
				})
			})
		})
	}
	for _, callers := range []int{1, 64} {
		b.Run(fmt.Sprintf("records/callers=%d", callers), func(b *testing.B) {
			s := newTest(b)
			spread(b, callers, func(n int64) error {
				return s.Update(context.Background(), put(fmt.Sprintf("sb_%016d", n)))
			})
		})
	}
	plain := map[string]func(*bolt.DB) func(func(*bolt.Tx) error) error{
		"update": func(db *bolt.DB) func(func(*bolt.Tx) error) error { return db.Update },
		"batch":  func(db *bolt.DB) func(func(*bolt.Tx) error) error { return db.Batch },
	}
	for _, name := range []string{"update", "batch"} {
		b.Run("bbolt-"+name+"/callers=64", func(b *testing.B) {
			db, err := bolt.Open(filepath.Join(b.TempDir(), "plain.db"), 0o600, &bolt.Options{NoFreelistSync: true, FreelistType: bolt.FreelistMapType, InitialMmapSize: initialMapBytes})
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = db.Close() }()
			err = db.Update(func(tx *bolt.Tx) error {
				_, err := tx.CreateBucket([]byte("b"))
				return err
			})
			if err != nil {
				b.Fatal(err)
			}
			commit := plain[name](db)
			spread(b, 64, func(n int64) error {
				return commit(func(tx *bolt.Tx) error {
					return tx.Bucket([]byte("b")).Put(numberBytes(uint64(n)), value)
				})
			})
		})
	}
}

// spread runs do b.N times from that many callers at once.
func spread(b *testing.B, callers int, do func(n int64) error) {
	b.Helper()
	var next atomic.Int64
	var group sync.WaitGroup
	b.ResetTimer()
	for range callers {
		group.Go(func() {
			for n := next.Add(1); n <= int64(b.N); n = next.Add(1) {
				if err := do(n); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "commits/s")
}
